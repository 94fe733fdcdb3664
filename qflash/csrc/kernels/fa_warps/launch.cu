// C entry of `fa_warps`.
#include "attn/entry.cuh"
#include "kernels/fa_warps/kernel.cuh"

QF_EXPORT int64_t qf_fa_warps_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa_warps(const QfAttnParams* p, void* stream) {
  using namespace qf::fa_warps;
  static std::atomic<uint64_t> devices_done{0};
  if (const int status = qf::check_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  if (const int status = qf::allow_shared_memory(qf_fa_warps_kernel, kSharedBytes, devices_done)) return status;
  return qf::launch(qf_fa_warps_kernel, *p, qf::grid_of(*p, kBlockM, 1), kThreads, kSharedBytes, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_warps", status); }
