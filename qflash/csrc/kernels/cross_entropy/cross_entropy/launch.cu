// C entry of `cross_entropy`.
#include "kernels/cross_entropy/cross_entropy/kernel.cuh"
#include "reduce/row_entry.cuh"

QF_EXPORT int64_t qf_cross_entropy_workspace(const QfCrossEntropyParams*) { return 0; }

QF_EXPORT int qf_cross_entropy(const QfCrossEntropyParams* p, void* stream) {
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  return qf::cross_entropy::run(*p, [&](auto... arguments) { return qf::launch_rows(arguments..., stream); });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("cross_entropy", status); }
