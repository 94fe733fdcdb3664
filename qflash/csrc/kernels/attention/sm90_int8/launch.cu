// C entry of `sm90_int8`, for one precision (-DQF_PRECISION): quantize q, and K and V unless they are kept, attend.
#include "common/parts.h"
#include "kernels/quantize_kv/sm90_quantize/launches.cuh"

#if QF_IN_PART(0)
#include "attn/entry.cuh"
#include "kernels/attention/sm90_int8/attend.cuh"

QF_EXPORT int64_t qf_sm90_int8_workspace(const QfAttnParams* p) { return qf::sm90::workspace_bytes(*p); }

QF_EXPORT int qf_sm90_int8(const QfAttnParams* p, void* stream) {
  using namespace qf;
  if (const int status = check_params(p, QF_DTYPE, QF_PRECISION)) return status;
  return sm90::attend(*p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_int8", status); }
#endif
