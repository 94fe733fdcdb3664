// C entry of `layer_norm`.
#include "kernels/layer_norm/layer_norm/kernel.cuh"
#include "reduce/row_entry.cuh"

QF_EXPORT int64_t qf_layer_norm_workspace(const QfRowsParams*) { return 0; }

QF_EXPORT int qf_layer_norm(const QfRowsParams* p, void* stream) {
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  return qf::layer_norm::run(*p, [&](auto... arguments) { return qf::launch_rows(arguments..., stream); });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("layer_norm", status); }
