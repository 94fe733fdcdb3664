// Sinks: a logit for each query head that joins the denominator of its rows where they are finished, as if there were
// one more key, of value 0. out = sum of P V / (l + 2^(sink - m)), with P = 2^(score - m) and l their sum.
#pragma once

#include "attn/cuda_core/softmax.cuh"

namespace qf {

// The sink of a head, which is also the lse of its rows that see no key: -inf where there is none.
__device__ __forceinline__ float sink_of(const QfAttnParams& p, int head) {
  return p.sinks ? p.sinks[head] : -infinity();
}

// How the sums of a row, taken relative to m, and its sink go together. Both are weighed relative to the larger one, so
// that neither overflows; by default there is no sink, and sums stay what they are.
struct WithSink {
  float top;          // base-2 reference of the new sums
  float keys = 1.0f;  // what the old ones are multiplied by
  float sink = 0.0f;  // the sink's weight

  // m: base-2 reference of the row's sums, -inf where there is nothing in them. offset: what its scores lack, as lse
  // does. A sink of NaN passes fmaxf by and reaches the sum through its weight.
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
