// The quantization pass over q, k and v together, as `sm90_int8` runs it: attention leaves nothing of it to look at.
#include "kernels/quantize_kv/sm90_quantize/config.h"
#include "kernels/quantize_kv/sm90_quantize/run.cuh"

// attn: what comes. p: what becomes of k and v. q, q_scale, q_dot_mean, counter: what becomes of q, and of the
// counter of work tiles. many_blocks: how many let a block take several heads.
QF_EXPORT int quantize_all(const QfAttnParams* attn, const QfQuantizeKvParams* p, int8_t* q, float* q_scale,
                           float* q_dot_mean, unsigned* counter, int64_t many_blocks) {
  using namespace qf::sm90_quantize;
  const qf::QuantizeAll all = {*attn, qf::kept_of(p->kv), {q, q_scale, q_dot_mean}, counter, p->rounding, p->seed};
  return qf::run_sm90_quantize<Element, kHeadDim>(all, nullptr, many_blocks);
}
