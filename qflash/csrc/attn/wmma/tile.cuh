// Tiles whose rows are padded by 16 bytes. wmma wants one stride for a whole matrix, so a swizzle is out of the
// question; padding does what a swizzle would. A row of a head_dim bucket is an even number of 16-byte chunks and one
// of padding: an odd number, so that eight neighbouring rows at one column start in eight different bank groups (group
// = address / 16 mod 8). Unpadded, rows of 128 bytes and more would all start in one: 8 passes instead of 1.
#pragma once

#include "attn/mma/tile.cuh"

namespace qf {

// Elements from one row to the next.
constexpr int padded_stride(int columns) { return columns + kPerChunk; }

// ChunkWalk over such a tile.
template <int kTileRows, int kRowChunks, int kThreads>
struct PaddedWalk : ChunkWalk<kTileRows, kRowChunks, kThreads> {
  using Base = ChunkWalk<kTileRows, kRowChunks, kThreads>;
  static_assert(kRowChunks % 2 == 0, "a row with its padding must be an odd number of chunks");

  __device__ static __forceinline__ int first_offset() {
    return 16 * (Base::first_row() * (kRowChunks + 1) + Base::first_chunk());
  }
  static constexpr __device__ __forceinline__ int shift(int i) {
    return 16 * (i / Base::kColumns * Base::kStep * (kRowChunks + 1) + i % Base::kColumns * Base::kAcross);
  }
  __device__ static __forceinline__ int offset(int i) { return first_offset() + shift(i); }
};

}  // namespace qf
