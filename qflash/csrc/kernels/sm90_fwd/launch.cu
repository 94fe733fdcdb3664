// C entry of `sm90_fwd`: stage what must be, make tensor maps, attend.
#include "attn/entry.cuh"
#include "hopper/tensor_map.h"
#include "kernels/sm90_fwd/kernel.cuh"
#include "kernels/sm90_fwd/stage.cuh"

namespace {

// Memory for one launch, in the order of its stream.
struct Borrowed {
  cudaStream_t on;
  void* memory = nullptr;
  cudaError_t take(int64_t bytes) { return cudaMallocAsync(&memory, size_t(bytes), on); }
  ~Borrowed() {
    if (memory) cudaFreeAsync(memory, on);
  }
};

}  // namespace

// The counter that items are drawn from comes first in the workspace, copies after it.
static int64_t counter_bytes(const qf::sm90_fwd::Items& items) { return items.drawn ? 256 : 0; }

QF_EXPORT int64_t qf_sm90_fwd_workspace(const QfAttnParams* p) {
  return counter_bytes(qf::sm90_fwd::items_of(*p)) + qf::sm90_fwd::Stage(*p, false).bytes;
}

QF_EXPORT int qf_sm90_fwd(const QfAttnParams* p, void* stream) {
  using namespace qf::sm90_fwd;
  if (const int status = qf::check_params(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim || p->head_dim % 8 != 0) return QF_UNSUPPORTED;
  Items items = items_of(*p);
  if (items.count == 0) return QF_OK;
  const Stage planned(*p, false), stage(*p, true);
  const int64_t counter = counter_bytes(items), needed = counter + planned.bytes;
  if (needed > 0 && (!p->workspace || p->workspace_bytes < needed)) return QF_NO_MEMORY;
  int device = 0, processors = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device))
    return error;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  Borrowed borrowed{on};  // for addresses that nobody could plan for
  if (stage.bytes > planned.bytes)
    if (const cudaError_t error = borrowed.take(stage.bytes)) return error;
  char* const memory =
      borrowed.memory ? static_cast<char*>(borrowed.memory) : static_cast<char*>(p->workspace) + counter;
  if (items.count <= processors) items.drawn = false;  // one for each block at most
  if (items.drawn) {
    items.next = static_cast<int*>(p->workspace);
    if (const cudaError_t error = cudaMemsetAsync(items.next, 0, sizeof(int), on)) return error;
  }

  if (stage.bytes > 0) {
    const dim3 blocks(unsigned(stage.blocks(processors)), 3);
    qf_sm90_fwd_stage_kernel<<<blocks, 256, 0, on>>>(*p, stage, memory, qf::rope_tables_vectorise(p->rope));
    if (const cudaError_t error = cudaGetLastError()) return int(error);
  }
  Maps maps{};
  const auto bring = [&](Which which, CUtensorMap& map, int box_rows) {
    const Staged& x = stage.tensors[which];
    if (x.rows == 0) return int(QF_OK);  // never read
    const QfTensor tensor = x.copied ? x.copy(memory, p->head_dim) : x.from;
    return qf::encode_tensor_map(map, tensor, QF_DTYPE, p->head_dim, x.rows, x.heads, x.batch, box_rows);
  };
  if (const int error = bring(kQ, maps.q, kBlockM)) return error;
  if (const int error = bring(kK, maps.k, kBlockN)) return error;
  if (const int error = bring(kV, maps.v, kBlockN)) return error;

  const bool plain = qf::scales_plainly(p->scale, p->softcap);
  const auto run = [&](auto* kernel, std::atomic<uint64_t>& devices_done) {
    if (const int status = qf::allow_shared_memory(kernel, kSharedBytes, devices_done)) return status;
    const int blocks = items.count < processors ? items.count : processors;
    kernel<<<blocks, kThreads, kSharedBytes, on>>>(*p, maps, items, qf::chunks_aligned(p->out, p->head_dim, 2));
    return int(cudaGetLastError());
  };
  static std::atomic<uint64_t> plainly{0}, otherwise{0};
  return plain ? run(qf_sm90_fwd_kernel<true>, plainly) : run(qf_sm90_fwd_kernel<false>, otherwise);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_fwd", status); }
