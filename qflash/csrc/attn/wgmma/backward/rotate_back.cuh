// Gradients of rotated queries and keys become gradients of the queries and keys that came: pairs of channels of the
// accumulators rotate back, in float32 and before they are rounded. Forward, (a, b) became (a c - b s, b c + a s).
//
// Interleaved pairs are a lane's neighbours. Of pairs half a rotation apart a lane has both where all channels rotate;
// else they meet in shared memory, two rows of a warp at a time.
#pragma once

#include "attn/rope.cuh"
#include "attn/wgmma/backward/work_tile.cuh"
#include "attn/wgmma/softmax.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// Of one row: its cosines and sines.
struct RowAngles {
  const float *g_cos, *g_sin;  // NULL: outside the tables
  float sign;
  bool rotates;

  __device__ __forceinline__ RowAngles(const QfRope& rope, int position, bool live)
      : g_cos(nullptr), g_sin(nullptr), sign(0.0f), rotates(live) {
    const Rotation rotation = rotation_at(rope, position);
    if (rotation.row < 0) return;
    const int64_t at = int64_t(rotation.row) * (rope.rotary_dim / 2);
    g_cos = rope.cos + at, g_sin = rope.sin + at, sign = rotation.sign;
  }
  // a and b are the pair's.
  __device__ __forceinline__ void rotate_back(int pair, float& a, float& b) const {
    if (!rotates) return;
    const float c = g_cos ? g_cos[pair] : nan(), s = g_sin ? g_sin[pair] * sign : nan();
    const float rotated = fmaf(b, s, a * c);
    b = fmaf(-a, s, b * c);
    a = rotated;
  }
};

// Of the lane's row h.
template <class Config>
__device__ __forceinline__ RowAngles angles_of(const QfRope& rope, const WorkTile<Config>& work, int h) {
  const int own = warp_row() + lane_index() / 4 + 8 * h, i = work.row0 + own;
  const Sequence& seq = work.seq;
  const bool live = own < work.live;
  if (!live) return RowAngles(rope, 0, false);
  return RowAngles(rope,
                   Config::kKeysStay ? position_k(rope, work.b, seq.k0, i)
                                     : position_q(rope, work.b, seq.q0, i, seq.len_q, seq.len_k),
                   true);
}

// s_scratch: the warp's, 2 kHeadDim floats.
template <class Config>
__device__ __forceinline__ void rotate_back(const QfRope& rope, const WorkTile<Config>& work,
                                            float (&O)[Config::kOTiles][4], float* s_scratch) {
  constexpr int kOTiles = Config::kOTiles, kHalfTiles = kOTiles / 2;
  const int first = lane_index() % 4 * 2, half = rope.rotary_dim / 2;  // first: the lane's, of every 8 channels
  if (rope.interleaved || rope.rotary_dim == Config::kHeadDim) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowAngles angles = angles_of(rope, work, h);
      if (rope.interleaved) {
#pragma unroll
        for (int j = 0; j < kOTiles; ++j)
          if (8 * j + first < rope.rotary_dim) angles.rotate_back((8 * j + first) / 2, O[j][2 * h], O[j][2 * h + 1]);
      } else {
#pragma unroll
        for (int j = 0; j < kHalfTiles; ++j)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e)
            angles.rotate_back(8 * j + first + e % 2, O[j][e], O[j + kHalfTiles][e]);
      }
    }
    return;
  }
#pragma unroll 1
  for (int quad = 0; quad < 8; ++quad) {
    const bool own = lane_index() / 4 == quad;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (own) s_scratch[e / 2 * Config::kHeadDim + 8 * j + first + e % 2] = O[j][e];
    __syncwarp();  // the rows are there
    if (own) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const RowAngles angles = angles_of(rope, work, h);
#pragma unroll
        for (int j = 0; j < kOTiles; ++j)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            const int d = 8 * j + first + e % 2;
            if (d >= rope.rotary_dim) continue;
            float other = s_scratch[h * Config::kHeadDim + (d < half ? d + half : d - half)];
            if (d < half)
              angles.rotate_back(d, O[j][e], other);
            else
              angles.rotate_back(d - half, other, O[j][e]);
          }
      }
    }
    __syncwarp();  // everybody has read them
  }
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
