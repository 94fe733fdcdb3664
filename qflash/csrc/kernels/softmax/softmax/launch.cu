// C entry of `softmax`.
#include "kernels/softmax/softmax/kernel.cuh"
#include "reduce/row_entry.cuh"

QF_EXPORT int64_t qf_softmax_workspace(const QfRowsParams*) { return 0; }

QF_EXPORT int qf_softmax(const QfRowsParams* p, void* stream) {
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  return qf::softmax::run(*p, [&](auto... arguments) { return qf::launch_rows(arguments..., stream); });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("softmax", status); }
