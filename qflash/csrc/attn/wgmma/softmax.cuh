// Online softmax in three steps, so that the tensor cores can work between them: find the reference, take the weights,
// and, once the product under way is done, rescale the outputs.
#pragma once

#include "attn/mma/product.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/wgmma/items.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace sm90 {

// Who somebody is among those who multiply. Derived afresh where it is used: registers are scarce.
__device__ __forceinline__ int consumer_of() { return int(uint32_t(fresh_tid()) / kGroupThreads) - 1; }
__device__ __forceinline__ int lane_of() { return int(uint32_t(fresh_tid()) % 32); }
__device__ __forceinline__ int warp_row() {  // from the block's first
  return int(uint32_t(fresh_tid() - kGroupThreads) / 32 * 16);
}

// Code for what seldom happens goes where it is not in the way of the rest.
__device__ __forceinline__ bool unlikely(bool x) { return __builtin_expect(x, false); }

// Of this lane's weights in a tile, for its two rows.
struct TileSums {
  float of[2];
};

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

__device__ __forceinline__ float max_of_warp(float x) {
  x = max_of_quad(x);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// What the lane's rows see of the tile that begins at key0, counted from the lane's first key.
struct RowKeys {
  KeyRange of[2];
};
__device__ __forceinline__ RowKeys tile_mask(const Record& record, int key0) {
  const int row = warp_row() + lane_of() / 4, key = key0 + lane_of() % 4 * 2;
  RowKeys seen;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    seen.of[h] = {record.window.begin + row + 8 * h - key,
                  min(record.window.end + row + 8 * h, record.mask.len_k) - key};
  return seen;
}

// Blanks out what rows do not see: keys from some row's end on, 32 at a time, as far as there are any; and keys before
// its begin, which only windows have.
__device__ __forceinline__ void mask_tile(float (&S)[1][kNTiles][4], const RowKeys& keys) {
  const int begin[2] = {keys.of[0].begin, keys.of[1].begin}, end[2] = {keys.of[0].end, keys.of[1].end};
#pragma unroll
  for (int first = 0; first < kNTiles; first += 4) {
    if (__all_sync(0xffffffffu, end[0] >= 8 * (first + 3) + 2)) continue;  // the other row sees no less
#pragma unroll
    for (int j = first; j < first + 4 && j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * j + e % 2 >= end[e / 2]) S[0][j][e] = -infinity();
  }
  if (__all_sync(0xffffffffu, begin[1] <= 0)) return;
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (8 * j + e % 2 < begin[e / 2]) S[0][j][e] = -infinity();
}

// The largest of this lane's scores of its row h, among the 8-key blocks first .. end - 1.
__device__ __forceinline__ float largest_score(const float (&S)[1][kNTiles][4], int h, int first, int end) {
  constexpr int kChains = 4;  // one would be as slow as its latency
  float top[kChains];
#pragma unroll
  for (int j = first; j < end; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * (j - first) + e;
      top[i % kChains] = i < kChains ? S[0][j][2 * h + e] : fmaxf(top[i % kChains], S[0][j][2 * h + e]);
    }
  return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}

// Moves the reference of rows whose scores outgrew it; largest: their largest base-2 scores. Returns whether some row
// of the warp did; rescale is then what outputs are to be multiplied by.
__device__ __forceinline__ bool move_reference(const float (&largest)[2], Rows& rows, float (&rescale)[2]) {
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) moved |= largest[h] > rows.m[h] + kSlack;  // -inf + kSlack: the first finite score does
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

}  // namespace sm90
}  // namespace qf
