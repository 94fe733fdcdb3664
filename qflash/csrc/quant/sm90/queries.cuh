// Queries to integers: every token has a scale of its own, so that warps are independent.
#pragma once

#include "attn/sequence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quant/sm90/tokens.cuh"

namespace qf {
namespace sm90_quantize {

template <class Element, int kHeadDim, Reads kReads>
__device__ __forceinline__ void quantize_queries(const QuantizeAll& all, const Deal& deal, uint32_t index) {
  using S = Shape<kHeadDim>;
  const QfAttnParams& p = all.attn;
  const TokenTile work(deal.q, index, p.q_heads);
  const Sequence s = read_sequence(p, work.b);
  if (!s.good) return;
  const int lane = threadIdx.x % 32, part = lane % S::kLanes, column = 16 * part;
  const int token0 = work.tile * S::kTokens + threadIdx.x / 32 * S::kWarpTokens + lane / S::kLanes * kRounds;
  const int existing = min(kRounds, s.len_q - token0);
  const int width = width_of(p.head_dim);
  const int64_t row0 = (p.cu_seqlens_q ? s.q0 : int64_t(work.b) * p.q_len) + token0;

#pragma unroll 1
  for (int h = work.h_begin; h < work.h_end; ++h) {
    float x[kRounds][16];
    load_tokens<kReads>(x, p, deal, row_of<Element>(p.q, work.b, s.q0 + token0, h), p.q.stride_t, existing, column,
                        [&](int r) { return position_q(p.rope, work.b, s.q0, token0 + r, s.len_q, s.len_k); });
    // Where the results of this lane's round go: token token0 + lane % 4.
    const int64_t at = (int64_t(work.b) * p.q_heads + h) * p.q_len + token0 + lane % kRounds;
    const bool owns = part < kRounds && lane % kRounds < existing;
    if (all.q.q_dot_mean) {
      float mean[16], dots[kRounds];
      wait_for_previous_grid();  // k_mean
      const int64_t kv_head = int64_t(work.b) * p.kv_heads + h / (p.q_heads / p.kv_heads);
      load_mean(mean, all.kv.k_mean + kv_head * p.head_dim, column, p.head_dim);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        dots[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) dots[r] = fmaf(x[r][i], mean[i], dots[r]);
      }
      const float dot = reduce_rounds<S::kLanes>(dots, lane, [](float a, float b) { return add_rn(a, b); });
      if (owns) all.q.q_dot_mean[at] = dot;
    }
    float largest[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      hadamard(x[r]);
      largest[r] = largest_of(x[r]);
    }
    // A lane divides for one round and broadcasts what the others need.
    const float mine = reduce_rounds<S::kLanes>(largest, lane, [](float a, float b) { return max_nan(a, b); });
    const bool nonfinite = !is_finite(mine);
    const Scale scale = scale_of(mine);
    if (owns) all.q.scale[at] = nonfinite ? nan() : scale.scale;
    const float inverse_or_negative = nonfinite ? -1.0f : scale.inverse;
    const Draws draws = {all.rounding == QF_STOCHASTIC, ~all.seed};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const float inverse = __shfl_sync(0xffffffffu, inverse_or_negative, (lane & ~(kRounds - 1)) + r);
      const int64_t element = ((row0 + r) * p.q_heads + h) * width + column;
      if (r < existing && column < width)
        store16(all.q.values + element, round16<kReads>(x[r], inverse, draws, uint64_t(element)), inverse >= 0.0f,
                kNonfiniteBytes);
    }
  }
}

}  // namespace sm90_quantize
}  // namespace qf
