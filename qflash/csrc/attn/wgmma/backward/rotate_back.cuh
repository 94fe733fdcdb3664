// Turns gradients of rotated queries and keys into gradients of the original ones: pairs of channels in the
// accumulators are rotated back, in float32 and before rounding. Forward maps (a, b) to (a c - b s, b c + a s).
//
// Interleaved pairs are adjacent in a lane. A lane also has both channels of half-split pairs if all channels rotate;
// otherwise pairs are exchanged through shared memory, two rows of a warp at a time.
#pragma once

#include "attn/rope.cuh"
#include "attn/wgmma/backward/work_tile.cuh"
#include "attn/wgmma/softmax.cuh"
#include "ptx/opaque.cuh"
#include "ptx/order.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// The cosines and sines of one row.
struct RowAngles {
  const QfRope& rope;
  int64_t at;  // -1: outside the tables
  float sign;
  bool rotates;

  __device__ __forceinline__ RowAngles(const QfRope& tables, int position, bool live)
      : rope(tables), at(-1), rotates(live) {
    const Rotation rotation = rotation_at(rope, position);
    if (rotation.row >= 0) at = int64_t(rotation.row) * (rope.rotary_dim / 2);
    sign = rotation.sign;
  }
  // a and b: the two channels of a pair.
  __device__ __forceinline__ void rotate_back(int pair, float& a, float& b) const {
    if (!rotates) return;
    const float c = at >= 0 ? rope.cos[at + pair] : nan(), s = at >= 0 ? rope.sin[at + pair] * sign : nan();
    const float first = fmaf(b, s, a * c);
    b = fmaf(-a, s, b * c);
    a = first;
  }
};

// For the lane's row h.
template <class Config>
__device__ __forceinline__ RowAngles angles_of(const QfRope& rope, const WorkTile<Config>& work, int h) {
  const int own = own_row<Config>(lane_index() / 4 + 8 * h), i = work.row0 + own;
  const Sequence& seq = work.seq;
  const bool live = own < work.live;
  if (!live) return RowAngles(rope, 0, false);
  return RowAngles(rope,
                   Config::kKeysStay ? position_k(rope, work.b, seq.k0, i)
                                     : position_q(rope, work.b, seq.q0, i, seq.len_q, seq.len_k),
                   true);
}

// s_scratch: 2 kHeadDim floats of this warp.
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
        for (int j = 0; j < kOTiles; ++j) {
          if (8 * j + first < rope.rotary_dim) angles.rotate_back((8 * j + first) / 2, O[j][2 * h], O[j][2 * h + 1]);
          if (never(half)) return;  // keeps the compiler from loading all of the tables at once
        }
      } else {
#pragma unroll
        for (int j = 0; j < kHalfTiles; ++j) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e)
            angles.rotate_back(8 * j + first + e % 2, O[j][e], O[j + kHalfTiles][e]);
          if (never(half)) return;
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int quad = 0; quad < 8; ++quad) {
    const bool own = lane_index() / 4 == quad;
    const int first = opaque(lane_index() % 4 * 2), half = opaque(rope.rotary_dim / 2);  // or addresses fill registers
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (own) s_scratch[e / 2 * Config::kHeadDim + 8 * j + first + e % 2] = O[j][e];
    __syncwarp();  // the rows have been written
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      RowAngles angles = angles_of(rope, work, h);
      angles.rotates &= own;
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
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
        if (never(half)) return;
      }
    }
    __syncwarp();  // all lanes have read them
  }
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
