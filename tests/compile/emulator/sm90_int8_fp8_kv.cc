#define QF_PV_FP8 1
#include "sm90_int8_on_host.h"

extern "C" int qf_sm90_int8_fp8_kv(const QfKvAttnParams* p, void*) {
  return attend_on_host(p->attn, &p->kv, p->rounding, p->seed);
}
extern "C" int64_t qf_sm90_int8_fp8_kv_workspace(const QfKvAttnParams* p) {
  return qf::sm90::workspace_bytes(p->attn, true);
}
