// What `sm90_int8`'s kernel is given: the problem, and what the pass before left of q, K and V.
#pragma once

#include "kernels/attention/sm90_int8/config.h"
#include "quant/sm90/kept.h"

namespace qf {
namespace sm90 {

struct Quantized {
  QfAttnParams attn;
  KeptKv kv;
  const float* q_scale;  // [batch, q_heads, q_len]
  const float* lift;     // the same: q . (what smoothing took off K); NULL where nobody needs it
  int64_t v_columns;     // of a channel of transposed V
};

}  // namespace sm90
}  // namespace qf
