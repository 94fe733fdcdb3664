// C entry of `fa_int8`: quantize q and k into the workspace, attend.
#include "attn/entry.cuh"
#include "attn/quantize.cuh"
#include "kernels/fa_int8/kernel.cuh"
#include "kernels/fa_int8/workspace.h"

QF_EXPORT int64_t qf_fa_int8_workspace(const QfAttnParams* p) { return qf::fa_int8::Workspace(*p).bytes; }

QF_EXPORT int qf_fa_int8(const QfAttnParams* p, void* stream) {
  using namespace qf::fa_int8;
  if (const int status = qf::check_params(p, QF_DTYPE, QF_INT8)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  Workspace workspace(*p);
  if (workspace.bytes > 0 && (!p->workspace || p->workspace_bytes < workspace.bytes)) return QF_NO_MEMORY;
  const QfInt8AttnParams int8 = workspace.place(*p);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (padded(p->head_dim) != p->head_dim)  // the channels that quantization does not write
    if (const cudaError_t error = cudaMemsetAsync(p->workspace, 0, workspace.q_scales, on)) return error;
  if (const int status = qf::launch_quantize<Element>(workspace.k, on)) return status;
  if (const int status = qf::launch_quantize<Element>(workspace.q, on)) return status;

  const Access access = {true, true, qf::chunks_aligned(p->v, p->head_dim, 2),
                         qf::chunks_aligned(p->out, p->head_dim, 2), kKeyGroupLog};
  const auto run = [&](auto* kernel, std::atomic<uint64_t>& devices_done) {
    if (const int status = qf::allow_shared_memory(kernel, kSharedBytes, devices_done)) return status;
    return qf::launch(kernel, int8, qf::grid_of(*p, kBlockM, 1), kThreads, kSharedBytes, stream, access);
  };
  static std::atomic<uint64_t> with_lse{0}, without_lse{0}, any{0};
  constexpr bool kCanCopyAsync = kArch >= 80;
  if (!kCanCopyAsync || !access.v) return run(qf_fa_int8_kernel<false, false, false, qf::ExactSums>, any);
  return p->lse ? run(qf_fa_int8_kernel<kCanCopyAsync, false, false, qf::ExactSums>, with_lse)
                : run(qf_fa_int8_kernel<kCanCopyAsync, false, false, qf::RoundedSums>, without_lse);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_int8", status); }
