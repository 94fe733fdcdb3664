// Online softmax in three steps, so that the tensor cores can work between them: find the reference, take the weights,
// and, once the product under way is done, rescale the outputs.
#pragma once

#include "attn/mma/softmax.cuh"
#include "kernels/sm90_fwd/config.h"

namespace qf {
namespace sm90_fwd {

// Of this lane's weights in a tile, for its two rows.
struct TileSums {
  float of[2];
};

// A lane's weights of a row and tile may add up to this before the row's reference must move: float16 holds it.
constexpr float kMostWeight = 16384.0f;
static_assert(kBlockN / 4 * (1 << int(kSlack)) <= kMostWeight, "a reference that stays was found to suffice");

// Of a lane's two rows.
struct Rows {
  float m[2] = {-infinity(), -infinity()};  // base-2 reference of the weights; -inf: nothing seen yet
  float l[2] = {};                          // sum of this lane's weights

  __device__ __forceinline__ bool settled() const {
    return __all_sync(0xffffffffu, m[0] > -infinity() && m[1] > -infinity());
  }
  __device__ __forceinline__ void add(const TileSums& sums) {
    l[0] += sums.of[0];
    l[1] += sums.of[1];
  }
};

// Blanks out what rows do not see, 32 keys at a time: where all of them are seen, nothing is to be done. `mask` counts
// from the lane's first key.
__device__ __forceinline__ void mask_tile(float (&S)[1][kNTiles][4], const TileMask<8>& mask) {
  const int begin[2] = {mask.begin(0), mask.begin(1)}, end[2] = {mask.end(0), mask.end(1)};
#pragma unroll
  for (int first = 0; first < kNTiles; first += 4) {
    const bool seen = begin[1] <= 8 * first && end[0] >= 8 * (first + 3) + 2;  // edges only grow from row to row
    if (__all_sync(0xffffffffu, seen)) continue;
#pragma unroll
    for (int j = first; j < first + 4 && j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = 8 * j + e % 2;
        if (key < begin[e / 2] || key >= end[e / 2]) S[0][j][e] = -infinity();
      }
  }
}

// Moves the reference of rows whose scores outgrew it. Returns whether some row of the warp did; rescale is then what
// outputs are to be multiplied by.
__device__ __forceinline__ bool move_reference(const float (&S)[1][kNTiles][4], float factor, Rows& rows,
                                               float (&rescale)[2]) {
  constexpr int kChains = 4;  // per row: one would be as slow as its latency
  float top[2][kChains];
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& most = top[e / 2][(2 * j + e % 2) % kChains];
      most = 2 * j + e % 2 < kChains ? S[0][j][e] : fmaxf(most, S[0][j][e]);
    }
  float largest[2];
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = max_of_quad(fmaxf(fmaxf(top[h][0], top[h][1]), fmaxf(top[h][2], top[h][3]))) * factor;
    moved |= largest[h] > rows.m[h] + kSlack;  // -inf + kSlack: the first finite score moves it
  }
  moved = __any_sync(0xffffffffu, moved);
  if (moved) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float larger = fmaxf(rows.m[h], largest[h]);
      rescale[h] = ex2(rows.m[h] - reference_of(larger));
      rows.m[h] = larger;
      rows.l[h] *= rescale[h];
    }
  }
  return moved;
}

// S becomes weights; returns their sums.
__device__ __forceinline__ TileSums take_weights(float (&S)[1][kNTiles][4], float factor, const Rows& rows) {
  const float shift[2] = {-reference_of(rows.m[0]), -reference_of(rows.m[1])};
  float sum[4] = {};
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      S[0][j][e] = ex2(fmaf(S[0][j][e], factor, shift[e / 2]));
      sum[e] += S[0][j][e];
    }
  return {{sum[0] + sum[1], sum[2] + sum[3]}};
}

__device__ __forceinline__ void rescale_outputs(float (&O)[1][kOTiles][4], const float (&rescale)[2]) {
#pragma unroll
  for (int j = 0; j < kOTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) O[0][j][e] *= rescale[e / 2];
}

// Weights as the A operand of PV: 16 keys of a lane's two rows.
template <template <class> class Part = Rounded>
__device__ __forceinline__ void weights_of(uint32_t (&a)[4], const float (&S)[1][kNTiles][4], int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = Part<Tensor>::pair(S[0][2 * k + i / 2][i % 2 * 2], S[0][2 * k + i / 2][i % 2 * 2 + 1]);
}

}  // namespace sm90_fwd
}  // namespace qf
