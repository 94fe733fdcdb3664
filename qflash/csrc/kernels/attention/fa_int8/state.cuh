// What a block of `fa_int8` needs once or twice per tile, and the values of one query before its scores are computed.
#pragma once

#include "attn/mma/int8.cuh"
#include "attn/mma/state.cuh"
#include "attn/schedule.cuh"
#include "kernels/attention/fa_int8/config.h"

namespace qf {
namespace fa_int8 {

struct State : BlockState<kWarps, kWarpRows> {
  const float* k_scales;  // of the sequence's keys in their head
  bool may_be_nonfinite;  // some of them may be nonfinite
  const int32_t* k_sums;  // with zero points: of their integers
  int zero_point;         // q's

  // The block's work tile. Collective; the caller's next barrier makes it visible. False: there is none.
  template <bool kZeroPoints>
  __device__ __forceinline__ bool begin(const QfAttnParams& p, const Grid& grid) {
    const Work work(p, grid);
    const Sequence sequence = read_sequence(p, work.b);
    fill_unserved_rows<Element>(p, sequence, work.b, work.h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
    if (!sequence.good || work.row_tile * kBlockM >= sequence.len_q) return false;
    const int kv_head = work.h / (p.q_heads / p.kv_heads);
    const HeadRows<int8_t> k(p.kv.k, work.b, sequence.k0, kv_head, 0, 0, false);
    const HeadRows<Element> v(p.kv.v, work.b, sequence.k0, kv_head, 0, 0, false);
    fill(p, work, sequence, k.g_head, v.g_head);
    if (threadIdx.x == 0) {
      k_scales = p.kv.k_scales.scale + work.b * p.kv.k_scales.stride_b + kv_head * p.kv.k_scales.stride_h;
      may_be_nonfinite = !p.kv.k_nonfinite || p.kv.k_nonfinite[int64_t(work.b) * p.kv_heads + kv_head] != 0;
      if constexpr (kZeroPoints) {
        k_sums = p.kv.k_scales.sums + (int64_t(work.b) * p.kv_heads + kv_head) * p.k_len;
        zero_point = *p.q_scales.zero_point;
      }
    }
    return true;
  }
};
static_assert(sizeof(State) <= kStateBytes, "");

// q . (what smoothing took off K) of one row, from its integers.
__device__ inline float q_dot_mean_of_integers(const QfAttnParams& p, const int8_t* g_q, int b, int h, int row) {
  const float* const g_mean = p.kv.k_mean + (int64_t(b) * p.kv_heads + h / (p.q_heads / p.kv_heads)) * p.head_dim;
  const int zero = p.q_scales.zero_point ? *p.q_scales.zero_point : 0;
  float sum = 0.0f;
  for (int d = 0; d < p.head_dim; ++d) sum += float(int(g_q[d]) - zero) * g_mean[d];
  return sum * scale_at(p.q_scales, b, h, row);
}

// The terms that all keys have in common in one row's products of (q - zq) and (k - zk), see start_with_each. Both have
// one scale.
__device__ inline float bias_of_zero_points(const QfAttnParams& p, int b, int h, int row) {
  const int sum = p.q_scales.sums[(int64_t(b) * p.q_heads + h) * p.q_len + row];
  const int zq = *p.q_scales.zero_point, zk = *p.kv.k_scales.zero_point;
  return float(zk * (p.head_dim * zq - sum)) * *p.q_scales.scale * *p.kv.k_scales.scale;
}

// The scale of one row of q; NaN for a nonfinite row, which its scale does not show where rows share one.
__device__ inline float scale_of_row(const QfAttnParams& p, const int8_t* g_q, int b, int h, int row) {
  return !p.q_scales.zero_point && g_q[0] == -128 ? nan() : scale_at(p.q_scales, b, h, row);
}

}  // namespace fa_int8
}  // namespace qf
