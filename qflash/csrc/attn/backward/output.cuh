// Epilogue of gradients: all threads of the block take rows of float32 in shared memory, rotate them back where there
// is a rope, scale, round and store them.
//
// Rope rotated pairs (a, b) of q and k into (a c - b s, b c + a s), so gradients (a, b) of rotated pairs become
// gradients (a c + b s, b c - a s) of the inputs. That happens in float32, before anything is rounded.
#pragma once

#include "attn/rope.cuh"
#include "attn/sequence.cuh"
#include "common/elements.cuh"
#include "ptx/ldst.cuh"

namespace qf {

// Where a row is stored, and how it is rotated back. position(row) is called only with a rope.
template <class Element>
struct GradientRows {
  Element* g_head;  // row 0 of the tile, channel 0
  int64_t stride_t;
  int rows;   // rows of the tile
  int exist;  // how many of these exist, from the first on; keys that do not exist get zeros
  int head_dim;
  float factor;
  bool aligned;  // every row may be stored 16 bytes at a time

  __device__ __forceinline__ GradientRows(const QfTensor& x, int b, int64_t row0, int h, int rows, int exist,
                                          int head_dim, float factor, bool aligned)
      : g_head(static_cast<Element*>(x.data) + b * x.stride_b + row0 * x.stride_t + h * x.stride_h),
        stride_t(x.stride_t),
        rows(rows),
        exist(exist),
        head_dim(head_dim),
        factor(factor),
        aligned(aligned) {}
};

// Channel `channel` of a row that rope rotated, rotated back. at(c): the row's channel c.
template <class At>
__device__ __forceinline__ float rotated_back(const QfRope& rope, const Rotation& rotation, int channel, At at) {
  if (channel >= rope.rotary_dim) return at(channel);
  if (rotation.row < 0) return nan();  // its position is outside the table, as it was in the forward rotation
  const int half = rope.rotary_dim / 2;
  const bool high = rope.interleaved ? channel % 2 == 1 : channel >= half;
  const int pair = rope.interleaved ? channel / 2 : high ? channel - half : channel;
  const int partner = rope.interleaved ? channel ^ 1 : high ? channel - half : channel + half;
  const int64_t entry = int64_t(rotation.row) * half + pair;
  const float cosine = rope.cos[entry], sine = rope.sin[entry] * rotation.sign;
  return fmaf(at(partner), high ? -sine : sine, at(channel) * cosine);
}

// The threads that store rows together: here, one warp.
struct WholeWarp {
  __device__ static __forceinline__ int thread() { return int(threadIdx.x % 32); }
  __device__ static __forceinline__ int threads() { return 32; }
};

// Rounds and stores 16 bytes of neighbouring channels at once; d: the first of them.
template <class Element, int kCount>
__device__ __forceinline__ void store16(Element* g_row, int d, const float (&x)[kCount]) {
  static_assert(kCount * sizeof(Element) == 16, "");
  Word4 raw;
  if constexpr (kCount == 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) raw.word[e] = float_to_bits(x[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      Element low, high;
      from_float(x[e], low);
      from_float(x[e + 1], high);
      raw.word[e / 2] = uint32_t(low.bits) | uint32_t(high.bits) << 16;
    }
  }
  st_global(g_row + d, raw);
}

// Stores rows of the tile to global memory. s_row(row, d): the address of four neighbouring channels from d on, d a
// multiple of 4; rotated: whether `rope` is to be rotated back.
template <int kHeadDim, class By = WholeBlock, class Element, class Row, class Position>
__device__ __forceinline__ void store_gradients(const GradientRows<Element>& to, const QfRope& rope, bool rotated,
                                                Row s_row, Position position) {
  constexpr int kAtOnce = 16 / int(sizeof(Element)), kPerRow = kHeadDim / kAtOnce;
  for (int i = By::thread(); i < to.rows * kPerRow; i += By::threads()) {
    const int row = i / kPerRow, d = i % kPerRow * kAtOnce;
    if (d >= to.head_dim) continue;
    float x[kAtOnce] = {};
    if (row < to.exist) {
      if (rotated) {
        const Rotation rotation = rotation_at(rope, position(row));
        const auto at = [&](int c) { return s_row(row, c / 4 * 4)[c % 4]; };
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e)
          if (d + e < to.head_dim) x[e] = rotated_back(rope, rotation, d + e, at);
      } else {
#pragma unroll
        for (int e = 0; e < kAtOnce; e += 4) {
          const float4 four = *reinterpret_cast<const float4*>(s_row(row, d + e));
          x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
        }
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) x[e] *= to.factor;
    }
    Element* const g_row = to.g_head + row * to.stride_t;
    if (to.aligned) {
      store16(g_row, d, x);
    } else {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e)
        if (d + e < to.head_dim) from_float(x[e], g_row[d + e]);
    }
  }
}

}  // namespace qf
