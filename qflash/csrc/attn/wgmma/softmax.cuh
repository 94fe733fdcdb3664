// Online softmax in three steps, so that the tensor cores can work between them: find the reference maximum, compute
// the weights, and, once the MMA in flight is complete, rescale the outputs.
//
// A lane has two rows (ptx/wgmma.cuh). Of row r, with m_ref its reference and s the base-2 scores:
//   weights  P = 2^(s - m_ref)     l = sum of P     out = sum of P V / l     lse = ln 2 (m_ref + log2 l)
// m_ref need not be the row's maximum: any reference gives the same quotient, as long as weights neither overflow nor
// vanish. So it is taken from the row's first tile, and moves only when scores outgrow it by 2^kSlack.
#pragma once

#include "attn/mma/softmax.cuh"
#include "attn/wgmma/work_tile.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace wgmma {

// The caller's index among the consumers. Recomputed at each use to save registers.
__device__ __forceinline__ int consumer_index() { return int(uint32_t(fresh_tid()) / kWarpgroupThreads) - 1; }
__device__ __forceinline__ int lane_index() { return int(uint32_t(fresh_tid()) % 32); }
__device__ __forceinline__ int warp_row() {  // from the block's first
  return int(uint32_t(fresh_tid() - kWarpgroupThreads) / 32 * 16);
}

// Moves the code of rare branches out of the hot path.
__device__ __forceinline__ bool unlikely(bool x) { return __builtin_expect(x, false); }

// State of a lane's two rows.
struct RowState {
  float m[2];        // base-2 reference of the weights; -inf: nothing seen yet
  float l[2];        // sum of this lane's weights of the tiles so far
  float sums[2];     // of this tile
  float rescale[2];  // factor for all that is relative to the references,
  int moved;         // if they moved in this tile

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = -infinity(), l[h] = 0.0f;
  }
  __device__ __forceinline__ bool settled() const {
    return __all_sync(0xffffffffu, m[0] > -infinity() && m[1] > -infinity());
  }
  __device__ __forceinline__ void add_sums() { l[0] += sums[0], l[1] += sums[1]; }

  // Moves the reference of rows whose scores outgrew it; largest: their largest base-2 scores. Returns whether the
  // reference of some row of the warp moved.
  __device__ __forceinline__ bool move(const float (&largest)[2]) {
    bool any = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) any |= largest[h] > m[h] + kSlack;  // -inf + kSlack: the first finite score moves it
    any = __any_sync(0xffffffffu, any);
    if (any) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float larger = fmaxf(m[h], largest[h]);
        rescale[h] = ex2(m[h] - reference_of(larger));
        m[h] = larger;
        l[h] *= rescale[h];
      }
    }
    return any;
  }
};

__device__ __forceinline__ float max_of_warp(float x) {
  x = max_of_quad(x);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Which keys of the tile that begins at key0 the lane's rows see, counted from the lane's first key.
struct VisibleKeys {
  KeyRange of[2];
};
template <class Config>
__device__ __forceinline__ VisibleKeys visible_keys(const WorkTile<Config>& work, int key0) {
  const int row = warp_row() + lane_index() / 4, key = key0 + lane_index() % 4 * 2;
  VisibleKeys seen;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    seen.of[h] = {work.window.begin + row + 8 * h - key, min(work.window.end + row + 8 * h, work.mask.len_k) - key};
  return seen;
}

// Sets what rows do not see to -inf: keys from some row's end on, 32 at a time, where there are any; and keys before
// its begin, which only windows have.
template <int kNTiles>
__device__ __forceinline__ void mask_tile(float (&S)[1][kNTiles][4], const VisibleKeys& keys) {
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

// This lane's largest score of its row h, among the 8-key blocks first .. end - 1.
template <int kNTiles>
__device__ __forceinline__ float largest_score(const float (&S)[1][kNTiles][4], int h, int first, int end) {
  constexpr int kChains = 4;  // a single chain would be bound by latency
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

template <int kOTiles>
__device__ __forceinline__ void clear_outputs(float (&O)[1][kOTiles][4]) {
#pragma unroll
  for (int j = 0; j < kOTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) O[0][j][e] = 0.0f;
}

template <int kOTiles>
__device__ __forceinline__ void rescale_outputs(float (&O)[1][kOTiles][4], const float (&rescale)[2]) {
#pragma unroll
  for (int j = 0; j < kOTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) O[0][j][e] *= rescale[e / 2];
}

}  // namespace wgmma
}  // namespace qf
