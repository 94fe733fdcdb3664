// Keys to integers: a mean is subtracted, and 64 tokens share a scale, which a few warps find together.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "quant/sm90/tokens.cuh"
#include "reduce/warp.cuh"

namespace qf {
namespace sm90_quantize {

// The maximum `value` of each of the block's kWarps warps; NaN if a warp has one. s_slots: kWarps floats that no thread
// reads any more.
template <int kWarps>
__device__ __forceinline__ void show_warps(float (&shown)[kWarps], float value, float* s_slots) {
  value = reduce_warp(value, [](float a, float b) { return max_nan(a, b); });
  if (threadIdx.x % 32 == 0) s_slots[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) shown[w] = s_slots[w];
}

// The maximum over the warps of this warp's group.
template <int kGroupWarps, int kWarps>
__device__ __forceinline__ float largest_of_group(const float (&shown)[kWarps]) {
  float largest = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    if (int(threadIdx.x / 32) / kGroupWarps == w / kGroupWarps) largest = max_nan(largest, shown[w]);
  return largest;
}

template <class Element, int kHeadDim, Reads kReads>
__device__ __forceinline__ void quantize_keys(const QuantizeAll& all, const Deal& deal, uint32_t index,
                                              float* s_memory) {
  using S = Shape<kHeadDim>;
  const QfAttnParams& p = all.attn;
  const TokenTile work(deal.k, index, p.kv_heads);
  const KeyRows s = read_key_rows(p, work.b);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane % S::kLanes, column = 16 * part;
  const int token0 = work.tile * S::kTokens + warp * S::kWarpTokens + lane / S::kLanes * kRounds;
  const int existing = min(kRounds, s.len - token0), owned = min(kRounds, s.owned - token0);
  const int group = work.tile * (S::kTokens / kKeyGroup) + warp / S::kGroupWarps;
  const int groups = (p.k_len + kKeyGroup - 1) / kKeyGroup;
  const int width = width_of(p.head_dim);
  const int64_t row0 = (p.cu_seqlens_k ? s.first : int64_t(work.b) * p.k_len) + token0;

#pragma unroll 1
  for (int h = work.h_begin; h < work.h_end; ++h) {
    const int64_t head = int64_t(work.b) * p.kv_heads + h;
    float* const s_slots = s_memory + (h & 1) * 2 * S::kWarps;  // others may still read those of the previous head
    float x[kRounds][16], largest[kRounds];
    load_tokens<kReads>(x, p, deal, row_of<Element>(p.kv.k, work.b, s.first + token0, h), p.kv.k.stride_t, existing,
                        column, [&](int r) { return position_k(p.rope, work.b, s.first, token0 + r); });
    float mean[16], most = 0.0f;
    wait_for_previous_grid();  // k_mean, k_nonfinite
    load_mean(mean, all.kv.k_mean + head * p.head_dim, column, p.head_dim);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) x[r][i] = sub_rn(x[r][i], mean[i]);
      hadamard(x[r]);
      largest[r] = r < existing ? largest_of(x[r]) : 0.0f;
      most = max_nan(most, largest[r]);
    }
    float shown[S::kWarps], of_block = 0.0f;
    show_warps(shown, most, s_slots);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) of_block = max_nan(of_block, shown[w]);
    uint32_t nonfinite = 0;  // bit r: token r is nonfinite
    if (!is_finite(of_block)) {
      most = 0.0f;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const float of_token = reduce_warp(largest[r], [](float a, float b) { return max_nan(a, b); }, S::kLanes);
        if (is_finite(of_token))
          most = max_nan(most, of_token);
        else
          nonfinite |= 1u << r;
      }
      if (part == 0 && nonfinite != 0) atomicAdd(all.kv.k_nonfinite + head, __popc(nonfinite));
      show_warps(shown, most, s_slots + S::kWarps);
    }
    const Scale scale = scale_of(largest_of_group<S::kGroupWarps>(shown));
    if (lane == 0 && warp % S::kGroupWarps == 0 && group < groups) all.kv.k_scale[head * groups + group] = scale.scale;
    const Draws draws = {all.rounding == QF_STOCHASTIC, all.seed};
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int64_t element = ((row0 + r) * p.kv_heads + h) * width + column;
      const bool spoiled = nonfinite >> r & 1;
      if (r < owned && column < width)
        store16(all.kv.k + element, round16<kReads>(x[r], scale.inverse, draws, uint64_t(element)),
                r < existing && !spoiled, spoiled ? kNonfiniteBytes : 0u);
    }
  }
}

}  // namespace sm90_quantize
}  // namespace qf
