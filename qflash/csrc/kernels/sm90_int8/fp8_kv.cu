// C entry of `sm90_int8_fp8_kv`: attend to K and V as quantize_kv left them.
#define QF_PV_FP8 1
#include "kernels/sm90_int8/entry.cuh"

QF_EXPORT int64_t qf_sm90_int8_fp8_kv_workspace(const QfKvAttnParams* p) {
  return qf::sm90::workspace_bytes(p->attn, true);
}

QF_EXPORT int qf_sm90_int8_fp8_kv(const QfKvAttnParams* p, void* stream) { return qf::sm90::attend_kept(*p, stream); }

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_int8_fp8_kv", status); }
