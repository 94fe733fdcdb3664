// Rare-tile policy of INT8 scores: handles references that moved, weights too large for P, and, for weights in E4M3,
// promotion of outputs and exact sums.
//
// The tensor cores' accumulators of 8-bit float MMAs keep about 12 bits and truncate the others towards zero: if V
// still has a mean, as it does when the mean changes along the sequence, this loses nearly 2 % of it per 1000 keys. So
// every kPromotedTiles tiles they are added to float32 accumulators in shared memory.
#pragma once

#include "attn/wgmma/scores_int8.cuh"

namespace qf {
namespace wgmma {

template <class Config, bool kPromotes>
struct Int8Rare {
  using Work = WorkTile<Config>;
  static constexpr int kOTiles = Config::kOTiles;
  using Outputs = float[1][kOTiles][4];

  // E4M3's codes show whether weights are too large; steady tiles are rounded in their loop anyway.
  static constexpr bool kRoundsLast = false;

  const SharedMemory<Config>& s;
  bool promoted;  // some outputs are in shared memory

  template <class Params>
  __device__ __forceinline__ Int8Rare(const Params&, const SharedMemory<Config>& shared) : s(shared) {}
  __device__ __forceinline__ void begin() { promoted = false; }

  // left: remaining tiles, including this one.
  template <class Scores, class Weights>
  __device__ __forceinline__ bool due(const Scores&, const Weights& weights, const RowState& rows, int left) const {
    bool any = weights.too_large(rows) || rows.moved;
    if constexpr (kPromotes) any = any || left % Config::kPromotedTiles == 0 || weights.exact;
    return __any_sync(0xffffffffu, any);
  }
  template <class Scores, class Weights>
  __device__ __forceinline__ void run(const Work& work, int key0, bool whole, int q_stage, int k_stage, int left,
                                      Scores& scores, Weights& weights, RowState& rows, Outputs& O) {
    const bool large = __any_sync(0xffffffffu, weights.too_large(rows));
    if (rows.moved) rescale(weights, rows, O);
    if (large) {
      scores.weigh_again(work, key0, whole, q_stage, k_stage, rows, weights);
      weights.round(scores.S);
      rescale(weights, rows, O);
    }
    rows.moved = false;
    if constexpr (kPromotes) {
      if (left % Config::kPromotedTiles == 0) promote(O);
      if (weights.exact) weights.add_exactly(rows, scores.S);
    }
  }
  // All tiles are done: adds the promoted outputs back.
  __device__ __forceinline__ void finish(Outputs& O) const {
    if (!kPromotes || !promoted) return;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      const float4 more = s_promoted()[32 * j];
      O[0][j][0] += more.x, O[0][j][1] += more.y, O[0][j][2] += more.z, O[0][j][3] += more.w;
    }
    __syncwarp();  // rows go where these were
  }
  // This warp's part of the memory for outputs, promoted or staged for the store.
  __device__ __forceinline__ char* s_outputs() const {
    return s.scratch + warp_row() * (Config::kOutputBytes / Config::kBlockM);
  }

 private:
  __device__ __forceinline__ float4* s_promoted() const {
    return reinterpret_cast<float4*>(s_outputs()) + lane_index();
  }

  // Rescales what is relative to references that moved.
  template <class Weights>
  __device__ __forceinline__ void rescale(Weights& weights, const RowState& rows, Outputs& O) {
    rescale_outputs(O, rows.rescale);
    if constexpr (kPromotes) {
      weights.rescale(rows.rescale);
      if (!promoted) return;
      float4* const s_sums = s_promoted();
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
        float4& sum = s_sums[32 * j];
        sum.x *= rows.rescale[0], sum.y *= rows.rescale[0], sum.z *= rows.rescale[1], sum.w *= rows.rescale[1];
      }
    }
  }
  __device__ __forceinline__ void promote(Outputs& O) {
    float4* const s_sums = s_promoted();
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      float4 sum = make_float4(O[0][j][0], O[0][j][1], O[0][j][2], O[0][j][3]);
      if (promoted) {
        const float4 before = s_sums[32 * j];
        sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
      }
      s_sums[32 * j] = sum;
    }
    promoted = true;
    clear_outputs(O);
  }
};

}  // namespace wgmma
}  // namespace qf
