// C entry of `sm90_fwd`.
#include "attn/entry.cuh"
#include "hopper/tensor_map.h"
#include "kernels/sm90_fwd/kernel.cuh"

QF_EXPORT int64_t qf_sm90_fwd_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_sm90_fwd(const QfAttnParams* p, void* stream) {
  using namespace qf::sm90_fwd;
  if (const int status = qf::check_params(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  const bool packed = p->cu_seqlens_q != nullptr;
  const int batch = packed ? 1 : p->batch;
  const int64_t rows_q = packed ? p->total_q : p->q_len, rows_k = packed ? p->total_k : p->k_len;
  const Items items = items_of(*p);
  if (items.count == 0) return QF_OK;
  if (!qf::tensor_maps(p->q, p->head_dim, p->q_heads, batch) ||
      !qf::tensor_maps(p->k, p->head_dim, p->kv_heads, batch) ||
      !qf::tensor_maps(p->v, p->head_dim, p->kv_heads, batch))
    return QF_UNSUPPORTED;
  Maps maps{};
  const auto encode = [&](CUtensorMap& map, const QfTensor& x, int64_t rows, int heads, int box_rows) {
    if (rows == 0) return int(QF_OK);  // never read
    return qf::encode_tensor_map(map, x, QF_DTYPE, p->head_dim, rows, heads, batch, box_rows);
  };
  if (const int error = encode(maps.q, p->q, rows_q, p->q_heads, kBlockM)) return error;
  if (const int error = encode(maps.k, p->k, rows_k, p->kv_heads, kBlockN)) return error;
  if (const int error = encode(maps.v, p->v, rows_k, p->kv_heads, kBlockN)) return error;
  const bool plain = qf::scales_plainly(p->scale, p->softcap);
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
    return error;
  const auto run = [&](auto* kernel, std::atomic<uint64_t>& devices_done) {
    if (const int status = qf::allow_shared_memory(kernel, kSharedBytes, devices_done)) return status;
    const int blocks = items.count < processors ? items.count : processors;
    kernel<<<blocks, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(
        *p, maps, items, qf::chunks_aligned(p->out, p->head_dim, 2));
    return int(cudaGetLastError());
  };
  static std::atomic<uint64_t> plainly{0}, otherwise{0};
  return plain ? run(qf_sm90_fwd_kernel<true>, plainly) : run(qf_sm90_fwd_kernel<false>, otherwise);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_fwd", status); }
