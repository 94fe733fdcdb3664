// Sinks: a logit per query head that is added to the denominator of its rows when they are finished, as if there were
// one more key, of value 0. out = sum of P V / (l + 2^(sink - m)), with P = 2^(score - m) and l their sum.
#pragma once

#include "attn/cuda_core/softmax.cuh"

namespace qf {

// The sink of a head, which is also the lse of its rows that see no key: -inf where there is none.
__device__ __forceinline__ float sink_of(const QfAttnParams& p, int head) {
  return p.sinks ? p.sinks[head] : -infinity();
}

// Combines the sums of a row, relative to m, with its sink. Both are taken relative to the larger one, so that neither
// overflows; by default there is no sink, and the sums are unchanged.
struct WithSink {
  float top;          // base-2 reference of the new sums
  float keys = 1.0f;  // what the old ones are multiplied by
  float sink = 0.0f;  // the sink's weight

  // m: base-2 reference of the row's sums, -inf if they are empty. offset: what its scores lack, and lse with them.
  // fmaxf ignores a NaN sink, which reaches the sum through its weight.
  __device__ __forceinline__ WithSink(float m, float logit, float offset) : top(m) {
    if (logit == -infinity()) return;
    const float base2 = (logit - offset) * kLog2e;
    top = fmaxf(m, base2);
    keys = m == top ? 1.0f : ex2(m - top);
    sink = base2 == top ? 1.0f : ex2(base2 - top);  // inf - inf would be NaN
  }
  __device__ __forceinline__ float total(float l) const { return fmaf(l, keys, sink); }
  __device__ __forceinline__ float lse(float l) const { return lse_of(top, total(l)); }
};

}  // namespace qf
