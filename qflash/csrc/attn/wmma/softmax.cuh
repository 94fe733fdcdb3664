// Online softmax of scores in shared memory by columns, in base 2. A warp has kWarpRows = 32 rows, one per lane; or 16,
// and lanes l and l + 16 share row l, four keys each in turn. Hardly any shuffles remain.
//
// Weights are rounded to 16 bits before they multiply V. Over many keys the errors average out; a row that sees only a
// few has outputs as large as V and would exceed float16's bound of 1e-3 (docs/numerics.md). Such rows keep the
// remainder of the rounding as 16 more bits, and multiply V by that as well.
#pragma once

#include "attn/mma/softmax.cuh"
#include "attn/wmma/product.cuh"

namespace qf {

template <int kWarpRows, int kKeys>
struct LaneRow {
  static_assert(kWarpRows == 32 || kWarpRows == 16, "a lane has a row, or half of one");
  static constexpr int kParts = 32 / kWarpRows;
  static constexpr int kScores = kKeys / kParts;  // per lane

  int row, part;
  __device__ __forceinline__ explicit LaneRow(int lane) : row(lane % kWarpRows), part(lane / kWarpRows) {}

  // Key of the lane's i-th score, counted from the tile's first.
  __device__ __forceinline__ int key(int i) const { return kParts == 1 ? i : i / 4 * 8 + 4 * part + i % 4; }

  __device__ static __forceinline__ float max_of_row(float x) {
    return kParts == 1 ? x : fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
  }
  __device__ static __forceinline__ float sum_of_row(float x) {
    return kParts == 1 ? x : x + __shfl_xor_sync(0xffffffffu, x, 16);
  }
};

// The lane's scores, in the groups of four that scale_scores works on.
template <class Lane>
struct LaneScores {
  float groups[1][Lane::kScores / 4][4];
  __device__ __forceinline__ float& operator[](int i) { return groups[0][i / 4][i % 4]; }
};

// A row's reference m of its weights (base 2; -inf: nothing seen yet) and the sum l of this lane's weights.
struct RowSum {
  float m = -infinity(), l = 0.0f;
};

// Writes the factor of a row into the 16 columns that scale_rows loads.
template <int kFactorStride, class Lane>
__device__ __forceinline__ void store_factor(float* s_factors, const Lane& lane, float factor) {
  constexpr int kShare = 16 / Lane::kParts;
  float* const s_row = s_factors + lane.row * kFactorStride + lane.part * kShare;
#pragma unroll
  for (int c = 0; c < kShare; c += 4)
    *reinterpret_cast<float4*>(s_row + c) = make_float4(factor, factor, factor, factor);
}

// Stores the lane's weights P, rounded, in its row of s_weights (kPStride elements per row); with `keep`, the
// remainders stay in P.
template <int kPStride, class Lane, class Element>
__device__ __forceinline__ void store_weights(Element* s_weights, const Lane& lane, LaneScores<Lane>& P, bool keep) {
  constexpr int kAtOnce = Lane::kParts == 1 ? 8 : 4;
  Element* const s_row = s_weights + lane.row * kPStride;
#pragma unroll
  for (int i = 0; i < Lane::kScores; i += kAtOnce) {
    uint32_t pairs[kAtOnce / 2];
#pragma unroll
    for (int e = 0; e < kAtOnce / 2; ++e) pairs[e] = Wmma<Element>::pair(P[i + 2 * e], P[i + 2 * e + 1]);
    if constexpr (kAtOnce == 8)
      *reinterpret_cast<uint4*>(s_row + lane.key(i)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    else
      *reinterpret_cast<uint2*>(s_row + lane.key(i)) = make_uint2(pairs[0], pairs[1]);
    if (keep) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) P[i + e] -= to_float(Element{uint16_t(pairs[e / 2] >> 16 * (e % 2))});
    }
  }
}

// S <- the lane's scores. s_scores has a column per key, kScoreStride floats apart.
template <int kScoreStride, class Lane>
__device__ __forceinline__ void load_scores(LaneScores<Lane>& S, const float* s_scores, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < Lane::kScores; ++i) S[i] = s_scores[lane.key(i) * kScoreStride + lane.row];
}

// Masks the keys of the tile that the lane's row does not see: those outside begin .. end-1.
template <class Lane>
__device__ __forceinline__ void mask_scores(LaneScores<Lane>& S, const Lane& lane, int begin, int end) {
#pragma unroll
  for (int i = 0; i < Lane::kScores; ++i)
    if (lane.key(i) < begin || lane.key(i) >= end) S[i] = -infinity();
}

// S becomes weights 2^(S * factor - m). Returns whether m moved for some row of the warp; then O must be scaled by the
// factors written to s_factors, which the warp sees after the caller's __syncwarp.
template <int kFactorStride, class Lane>
__device__ __forceinline__ bool online_softmax(LaneScores<Lane>& S, const Lane& lane, RowSum& sum, float factor,
                                               float* s_factors) {
  float top = S[0];
#pragma unroll
  for (int i = 1; i < Lane::kScores; ++i) top = fmaxf(top, S[i]);
  top = Lane::max_of_row(top) * factor;
  const bool moved = __any_sync(0xffffffffu, top > sum.m + kSlack);
  if (moved) {
    const float m = fmaxf(sum.m, top), rescale = ex2(sum.m - reference_of(m));
    sum.m = m;
    sum.l *= rescale;
    store_factor<kFactorStride>(s_factors, lane, rescale);
  }
  const float reference = reference_of(sum.m);
#pragma unroll
  for (int i = 0; i < Lane::kScores; ++i) {
    S[i] = ex2(fmaf(S[i], factor, -reference));
    sum.l += S[i];
  }
  return moved;
}

}  // namespace qf
