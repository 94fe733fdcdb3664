// C entry of `quantize`.
#include "kernels/quantize/quantize/config.h"
#include "kernels/quantize/quantize/passes.cuh"
#include "kernels/quantize/quantize/rows.cuh"

QF_EXPORT int64_t qf_quantize_workspace(const QfQuantizeParams* p) { return qf::quantize_workspace(*p); }

QF_EXPORT int qf_quantize(const QfQuantizeParams* p, void* stream) {
  using namespace qf::quantize;
  if (p->struct_bytes == int32_t(sizeof *p) && p->dtype != QF_DTYPE) return QF_UNSUPPORTED;
  const auto on = static_cast<cudaStream_t>(stream);
  if (qf::check_quantize(*p) == QF_OK && qf::is_rows(*p)) return qf::run_rows<Element>(*p, kOverlaps, on);
  return qf::run_quantize<Element, true>(*p, on);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("quantize", status); }
