// C entry of `quantize`.
#include "kernels/quantize/quantize/config.h"
#include "kernels/quantize/quantize/passes.cuh"

QF_EXPORT int64_t qf_quantize_workspace(const QfQuantizeParams* p) { return qf::quantize_workspace(*p); }

QF_EXPORT int qf_quantize(const QfQuantizeParams* p, void* stream) {
  if (p->struct_bytes == int32_t(sizeof *p) && p->dtype != QF_DTYPE) return QF_UNSUPPORTED;
  return qf::run_quantize<qf::quantize::Element, true>(*p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("quantize", status); }
