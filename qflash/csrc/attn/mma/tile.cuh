// Tiles of q, k and v on their way into swizzled shared memory, 16 bytes (kPerChunk elements) at a time: asynchronously
// where rows are aligned and stay as they are, through registers where they are rotated or start at odd addresses.
#pragma once

#include "attn/rope.cuh"
#include "attn/tile_load.cuh"
#include "ptx/cp_async.cuh"
#include "smem/swizzle.cuh"

namespace qf {

constexpr int kPerChunk = 8;  // 16-bit elements in 16 bytes

// How the threads of a block share a tile: neighbouring threads take neighbouring chunks of a row. Where whole rows, a
// multiple of the swizzle's period, fall to the block at a time, a thread keeps its column and its place in the
// pattern, and all its chunks lie at one offset plus constants.
template <int kTileRows, int kRowChunks, int kThreads>
struct ChunkWalk {
  static constexpr int kChunks = kRowChunks;
  static constexpr int kCopies = kTileRows * kRowChunks / kThreads;
  static_assert(kCopies * kThreads == kTileRows * kRowChunks, "the walk must come out even");
  static constexpr int kStep = kThreads / kRowChunks;  // rows that the block copies at once
  static constexpr bool kRegular = kThreads % kRowChunks == 0 && kStep % 8 == 0;

  __device__ static __forceinline__ int row(int i) {
    return kRegular ? fresh_tid() / kRowChunks + i * kStep : (fresh_tid() + i * kThreads) / kRowChunks;
  }
  __device__ static __forceinline__ int chunk(int i) {
    return kRegular ? fresh_tid() % kRowChunks : (fresh_tid() + i * kThreads) % kRowChunks;
  }
  // Byte offset in the tile of this thread's i-th chunk.
  __device__ static __forceinline__ int offset(int i) {
    return kRegular ? Swizzle<kRowChunks>::offset(row(0), chunk(0)) + i * kStep * 16 * kRowChunks
                    : Swizzle<kRowChunks>::offset(row(i), chunk(i));
  }
};

// s_tile <- rows row0 ..; zeros past the last row and the last channel. Every row starts at a multiple of 16 bytes.
template <class Walk, class Element>
__device__ __forceinline__ void copy_async(char* s_tile, const HeadRows<Element>& x, int row0) {
#pragma unroll
  for (int i = 0; i < Walk::kCopies; ++i) {
    const int row = row0 + Walk::row(i), d = Walk::chunk(i) * kPerChunk;
    cp_async_16(s_tile + Walk::offset(i), x.row(row) + d, row < x.length && d < x.head_dim);
  }
}

template <class Element>
__device__ __forceinline__ uint4 pack8(const float4& low, const float4& high) {
  const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  Element y[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) from_float(x[e], y[e]);
  uint2 half[2];
  pack(y, half[0]);
  pack(y + 4, half[1]);
  return make_uint4(half[0].x, half[0].y, half[1].x, half[1].y);
}

// The same through registers, for rows of any alignment.
template <class Walk, class Element>
__device__ __forceinline__ void copy_through_registers(char* s_tile, const HeadRows<Element>& x, int row0,
                                                       bool aligned) {
  constexpr int kAtOnce = Walk::kCopies % 4 == 0 ? 4 : Walk::kCopies % 3 == 0 ? 3 : Walk::kCopies % 2 == 0 ? 2 : 1;
#pragma unroll 1
  for (int first = 0; first < Walk::kCopies; first += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row0 + Walk::row(first + i), d = Walk::chunk(first + i) * kPerChunk;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (row >= x.length || d >= x.head_dim) continue;
      if (aligned) {
        raw[i] = *reinterpret_cast<const uint4*>(x.row(row) + d);
      } else {
        const uint2 low = load4(x.row(row), d, x.head_dim, x.vector);
        const uint2 high = load4(x.row(row), d + 4, x.head_dim, x.vector);
        raw[i] = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) *reinterpret_cast<uint4*>(s_tile + Walk::offset(first + i)) = raw[i];
  }
}

// The same, rotated: position(row) says where a row stands.
template <class Walk, class Element, class Position>
__device__ __forceinline__ void copy_rotated(char* s_tile, const HeadRows<Element>& x, int row0, const QfRope& rope,
                                             bool rope_vector, Position position) {
#pragma unroll 1
  for (int i = 0; i < Walk::kCopies; ++i) {
    const int row = row0 + Walk::row(i), d = Walk::chunk(i) * kPerChunk;
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (row < x.length && d < x.head_dim) {
      const Element* g_row = x.row(row);
      const int at = position(row);
      const auto turned = [&](int channel) {
        return rope4(rope, g_row, channel, x.head_dim, at,
                     to_float4(load4(g_row, channel, x.head_dim, x.vector), g_row), rope_vector && x.vector);
      };
      raw = pack8<Element>(turned(d), turned(d + 4));
    }
    *reinterpret_cast<uint4*>(s_tile + Walk::offset(i)) = raw;
  }
}

// May x be copied 16 bytes at a time? Host side.
inline bool chunks_aligned(const QfTensor& x, int head_dim, int element_bytes) {
  const int per_chunk = 16 / element_bytes;
  return head_dim % per_chunk == 0 && x.stride_b % per_chunk == 0 && x.stride_t % per_chunk == 0 &&
         x.stride_h % per_chunk == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace qf
