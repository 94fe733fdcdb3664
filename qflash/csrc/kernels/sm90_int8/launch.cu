// C entry of `sm90_int8`: quantize q, K and V, attend.
#define QF_PV_FP8 0
#include "kernels/sm90_int8/entry.cuh"

QF_EXPORT int64_t qf_sm90_int8_workspace(const QfAttnParams* p) { return qf::sm90::workspace_bytes(*p, false); }

QF_EXPORT int qf_sm90_int8(const QfAttnParams* p, void* stream) {
  return qf::sm90::attend_on(*p, nullptr, QF_NEAREST, 0, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_int8", status); }
