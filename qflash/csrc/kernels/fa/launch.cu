// C entry of `fa`.
#include "attn/entry.cuh"
#include "kernels/fa/kernel.cuh"

QF_EXPORT int64_t qf_fa_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa(const QfAttnParams* p, void* stream) {
  static std::atomic<uint64_t> devices_done{0};
  if (const int status = qf::check_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > qf::fa::kHeadDim) return QF_UNSUPPORTED;
  if (const int status = qf::allow_shared_memory(qf_fa_kernel, qf::fa::kSharedBytes, devices_done)) return status;
  return qf::launch(qf_fa_kernel, *p, qf::grid_of(*p, qf::fa::kBlockM, 1), qf::fa::kThreads, qf::fa::kSharedBytes,
                    stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa", status); }
