// Tiles whose rows are padded by 16 bytes. wmma requires one stride for a whole matrix, which rules out a swizzle;
// padding has the same effect. A row of a head_dim bucket is an even number of 16-byte chunks and one of padding: an
// odd number, so that eight neighbouring rows at one column start in eight different bank groups (group = address / 16
// mod 8). Unpadded, rows of 128 bytes and more would all start in one: 8 passes instead of 1.
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

// s_tile <- rows row0 .. of x; zeros past the last row and the last channel. kAsync: rows start at multiples of 16
// bytes, and the copies form their own cp.async group. Otherwise they go through registers.
template <class Walk, bool kAsync, class Element>
__device__ __forceinline__ void load_tile(char* s_tile, const HeadRows<Element>& x, int row0, bool aligned) {
  if constexpr (kAsync) {
    copy_async<Walk>(s_tile, x.g_head, x.stride_t, row0, x.length, x.head_dim);
    cp_async_commit();
  } else {
    copy_through_registers<Walk>(s_tile, x, row0, aligned);
  }
}

}  // namespace qf
