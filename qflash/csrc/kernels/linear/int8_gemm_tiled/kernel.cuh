// int8_gemm_tiled: out = a b on CUDA cores, four products an instruction (dp4a), exact int32 sums.
//
//                    kBlockN = 128 columns              256 threads, 8 warps as 4 x 2 over the tile.
//                 +------------+------------+           Thread (y, x), both 0..15, owns 8 x 8 sums in registers:
//                 | 4x ..+3    | 64+4x ..+3 |           rows    4y ..+3 and 64 + 4y ..+3,
//        4y ..+3  |   4 x 4    |   4 x 4    |           columns 4x ..+3 and 64 + 4x ..+3.
//   128  ---------+------------+------------+           Per word of four k: 4 shared loads of 16 bytes,
//   rows 64+4y    |   4 x 4    |   4 x 4    |           64 dp4a.
//                 +------------+------------+
//
// Shared memory, 32 KB, two buffers of
//   s_a [16][128] words   word (g, row): a[row][4g ..+3]
//   s_b [16][128] words   word (g, column): b[4g ..+3][column]
// Words of one k lie side by side along rows and columns, so four of them are one 16-byte load. `place` below permutes
// them for the banks' sake.
//
// Pipeline: fetch the next 64 bytes of every row into registers, multiply the current buffer, stash into the other one,
//   meet at a barrier. One barrier is enough: the other buffer was last read before the previous one.
//
// b may be contiguous along k (fetched like a) or along n: then a thread fetches 4 k x 16 n and transposes it in
//   registers (gemm/bytes.cuh) into 16 words that lie side by side.
//
// Bound: dp4a issues at 64 lanes per clock and multiprocessor, 512 operations. See docs/kernels/int8_gemm_tiled.md.
#pragma once

#include "gemm/bytes.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/schedule.cuh"
#include "kernels/linear/int8_gemm_tiled/config.h"
#include "ptx/dp4a.cuh"
#include "ptx/tid.cuh"
#include "smem/lanes.cuh"

namespace qf {
namespace int8_gemm_tiled {

using namespace qf::gemm;

// Where word (group, row) of a tile lies: rows in order, but for two exclusive ors that keep fours together.
//   8 (group / 4 % 4): a warp stashes word j of 8 rows x 4 chunks, that is of groups 4c + j. Without it the four chunks
//     meet in the same 8 banks; with it chunk c lies 8c banks further and the 32 words fill the 32 banks.
//   4 (row / 32 % 4): eight lanes stash four words each, 16 rows apart (ColumnsTile). Without it they meet in two of
//   the
//     eight groups of four banks; with it they fill all eight.
// Readers take four rows from 4x, x = 0..7 of an aligned 32: those move together or trade places within the 32.
__device__ __forceinline__ unsigned place(unsigned group, unsigned row) {
  return group * kBlockM + (row ^ (group / 4 % 4 * 8) ^ (row / 32 % 4 * 4));
}

// A tile of a matrix whose rows run along k: two chunks of 16 bytes per thread.
struct RowsTile {
  static constexpr int kChunksPerRow = kBlockK / 16, kRowsPerPass = kThreads / kChunksPerRow;
  static constexpr int kPasses = kBlockM / kRowsPerPass;
  Bytes16 held[kPasses];

  __device__ __forceinline__ void fetch(const ByteMatrix& x, int row0, int k0) {
    const unsigned thread = fresh_tid(), chunk = thread % kChunksPerRow;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      held[i] = load16(x, row0 + thread / kChunksPerRow + i * kRowsPerPass, k0 + chunk * 16);
  }

  __device__ __forceinline__ void stash(uint32_t* s_tile) const {
    const unsigned thread = fresh_tid(), chunk = thread % kChunksPerRow;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        s_tile[place(chunk * 4 + j, thread / kChunksPerRow + i * kRowsPerPass)] = held[i].word[j];
  }
};

// A tile of b whose rows run along n: half of the threads take 4 k x 16 n each.
struct ColumnsTile {
  static constexpr int kAcross = kBlockN / 16, kWorkers = kGroups * kAcross;
  Bytes16 held[4];

  __device__ __forceinline__ void fetch(const ByteMatrix& x, int column0, int k0) {
    const unsigned thread = fresh_tid(), group = thread / kAcross, across = thread % kAcross;
    if (thread >= kWorkers) return;
#pragma unroll
    for (int r = 0; r < 4; ++r) held[r] = load16(x, k0 + 4 * group + r, column0 + 16 * across);
  }

  __device__ __forceinline__ void stash(uint32_t* s_tile) const {
    const unsigned thread = fresh_tid(), group = thread / kAcross, across = thread % kAcross;
    if (thread >= kWorkers) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t word[4];
      transpose4x4(word, held[0].word[i], held[1].word[i], held[2].word[i], held[3].word[i]);
      *reinterpret_cast<uint4*>(s_tile + place(group, 16 * across + 4 * i)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// Eight words of one k: rows (columns) first ..+3 and first + 64 ..+3.
__device__ __forceinline__ void load_words(uint32_t (&word)[kOwn], const uint32_t* s_tile, int group, int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 four = *reinterpret_cast<const uint4*>(s_tile + place(group, first + 64 * half));
    word[4 * half] = four.x, word[4 * half + 1] = four.y, word[4 * half + 2] = four.z, word[4 * half + 3] = four.w;
  }
}

__device__ __forceinline__ void multiply(int32_t (&sums)[kOwn][kOwn], const uint32_t* s_a, const uint32_t* s_b, int row,
                                         int column) {
#pragma unroll 4
  for (int group = 0; group < kGroups; ++group) {
    uint32_t a[kOwn], b[kOwn];
    load_words(a, s_a, group, row);
    load_words(b, s_b, group, column);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) sums[i][j] = dp4a(a[i], b[j], sums[i][j]);
  }
}

__device__ __forceinline__ void store_out(const QfLinearParams& p, bool vector, int row, int column,
                                          const int32_t (&sums)[kOwn][kOwn]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Columns<4> columns(p, column + 64 * half);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int32_t four[4] = {sums[i][4 * half], sums[i][4 * half + 1], sums[i][4 * half + 2], sums[i][4 * half + 3]};
      store_columns<Out, kActivation>(p, vector, row + i % 4 + i / 4 * 64, column + 64 * half, four, columns);
    }
  }
}

}  // namespace int8_gemm_tiled
}  // namespace qf

template <class BTile>
__global__ void __launch_bounds__(qf::int8_gemm_tiled::kThreads, qf::int8_gemm_tiled::kMinBlocks)
    qf_int8_gemm_tiled_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  using namespace qf;
  using namespace qf::int8_gemm_tiled;
  extern __shared__ float4 s_memory[];
  uint32_t* s_now = reinterpret_cast<uint32_t*>(s_memory);  // being multiplied
  uint32_t* s_next = s_now + kBufferWords;                  // being filled

  const Tile tile(grid, blockIdx.x, kBandRows);
  const int row0 = tile.row * kBlockM, column0 = tile.column * kBlockN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 4 * (warp % 4 * 4 + Lanes<kLanesX>::y(lane)), column = 4 * (warp / 4 * 8 + Lanes<kLanesX>::x(lane));

  RowsTile a;
  BTile b;
  const auto fetch = [&](int k0) { a.fetch(grid.x, row0, k0), b.fetch(grid.w[0], column0, k0); };
  const auto stash = [&](uint32_t* s_buffer) { a.stash(s_buffer), b.stash(s_buffer + kTileWords); };

  int32_t sums[kOwn][kOwn] = {};
  const int k = int(p.k);
  if (k > 0) {
    fetch(0);
    stash(s_now);
  }
  __syncthreads();
#pragma unroll 1
  for (int k0 = 0; k0 < k; k0 += kBlockK) {
    const bool more = k0 + kBlockK < k;
    if (more) fetch(k0 + kBlockK);
    multiply(sums, s_now, s_now + kTileWords, row, column);
    if (more) stash(s_next);
    __syncthreads();
    uint32_t* const s_swap = s_now;
    s_now = s_next, s_next = s_swap;
  }

  store_out(p, grid.vector_out, row0 + row, column0 + column, sums);
}
