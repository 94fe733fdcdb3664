#define QF_PV_FP8 1
#include "sm90_int8_on_host.h"

extern "C" int qf_sm90_int8_fp8_kv(const QfKvAttnParams* p, void*) {
  return attend_on_host(p->attn, &p->kv, p->rounding, p->seed);
}
