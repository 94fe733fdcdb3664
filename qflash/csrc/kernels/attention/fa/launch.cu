// C entry of `fa`.
#include "attn/entry.cuh"
#include "kernels/attention/fa/kernel.cuh"

QF_EXPORT int64_t qf_fa_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa(const QfAttnParams* p, void* stream) {
  if (const int status = qf::check_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > qf::fa::kHeadDim) return QF_UNSUPPORTED;
  return qf::launch_grid(qf_fa_kernel, *p, qf::grid_of(*p, qf::fa::kBlockM, 1), qf::fa::kThreads, qf::fa::kSharedBytes,
                         stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa", status); }
