// What INT8 attention on Hopper is given: the problem, and what the quantization pass left of q, K and V.
#pragma once

#include "quant/sm90/kept.h"

namespace qf {

struct QuantizedProblem {
  QfAttnParams attn;
  KeptKv kv;
  const float* q_scale;     // [batch, q_heads, q_len]
  const float* q_dot_mean;  // the same: rotated query . k_mean, which smoothing took off; NULL where nobody needs it
  int64_t v_columns;        // of a channel of transposed V
};

}  // namespace qf
