// C entry of `fa_warps`.
#include "attn/entry.cuh"
#include "kernels/attention/fa_warps/kernel.cuh"

QF_EXPORT int64_t qf_fa_warps_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa_warps(const QfAttnParams* p, void* stream) {
  using namespace qf::fa_warps;
  if (const int status = qf::check_unrotated_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  return qf::launch_grid(qf_fa_warps_kernel, *p, qf::grid_of(*p, kBlockM, 1), kThreads, kSharedBytes, stream);
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text("fa_warps", status, ", takes no rope or packed arrays");
}
