// C entry of `sm90_quantize`.
#include "common/parts.h"
#include "kernels/quantize_kv/sm90_quantize/launches.cuh"

#if QF_IN_PART(0)
#include "kernels/quantize_kv/sm90_quantize/config.h"
#include "kernels/quantize_kv/sm90_quantize/run.cuh"

QF_EXPORT int64_t qf_sm90_quantize_workspace(const QfQuantizeKvParams*) { return 0; }

QF_EXPORT int qf_sm90_quantize(const QfQuantizeKvParams* p, void* stream) {
  if (p->struct_bytes != int32_t(sizeof *p)) return QF_BAD_ABI;
  if (p->dtype != QF_DTYPE || p->k_len > qf::kMaxLength || !qf::writes_kept(*p)) return QF_UNSUPPORTED;
  return qf::run_sm90_quantize<qf::sm90_quantize::Element, qf::sm90_quantize::kHeadDim>(
      qf::quantization_of(*p), static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_quantize", status); }
#endif
