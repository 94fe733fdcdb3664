// The input of INT8 attention on Hopper: the problem, and q, K and V as written by the quantization pass.
#pragma once

#include "quant/sm90/kept.h"

namespace qf {

struct QuantizedProblem {
  QfAttnParams attn;
  KeptKv kv;
  const float* q_scale;     // [batch, q_heads, q_len]
  const float* q_dot_mean;  // the same: rotated query . k_mean, subtracted by smoothing; NULL if not needed
  int64_t v_columns;        // of a channel of transposed V
};

}  // namespace qf
