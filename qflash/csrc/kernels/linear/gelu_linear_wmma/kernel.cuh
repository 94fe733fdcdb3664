// gelu_linear_wmma: out = gelu(x w + bias) + residual in one pass, with WMMA. float16 and bfloat16, float32
// accumulators.
//
//                 128 columns                 256 threads, 8 warps of 32 x 64: 2 x 4 accumulator fragments of 16 x 16.
//          +-----------+-----------+          Per 16 of k a warp loads 2 fragments of x and 4 of w for 8 MMAs.
//     128  | warp 0    | warp 4    |
//     rows | warp 1    | warp 5    |          x, w (shared) -> fragments -> accumulators (fragments)
//          | warp 2    | warp 6    |             -> 16 rows (shared) -> bias, GeLU, residual -> out
//          | warp 3    | warp 7    |
//          +-----------+-----------+
//
// Fragments are opaque: which elements a lane holds, and so which bias belongs to them, is unspecified. The epilogue
// therefore starts with a pass through shared memory. gemm_mma has that pass as well, but only for its stores; and it
// knows the layout of its operand fragments, so its tiles are swizzled where these are padded.
//
// Shared memory, 40 KB, two buffers of
//   s_x [128][32 + 8]                      rows along k
//   s_w [128][32 + 8], or [32][128 + 8]    columns along k, or rows along n: wmma takes B by columns or by rows
// and, in their place in the epilogue, 4.5 KB per warp for 16 rows of accumulators.
//
// Pipeline: fetch the next step into registers, multiply the current buffer, stash into the other one, synchronize.
//   One barrier per step is enough: the other buffer was last read before the previous barrier.
//
// Rejects every other activation (qflash/dispatch.py). Bound: shared memory. See docs/kernels/gelu_linear_wmma.md.
#pragma once

#include "common/wmma.cuh"
#include "gemm/schedule.cuh"
#include "kernels/linear/gelu_linear_wmma/config.h"
#include "ptx/tid.cuh"

namespace qf {
namespace gelu_linear_wmma {

using gemm::ByteMatrix;
using gemm::Bytes16;

// Contiguous along k: [128 rows][64 bytes], two chunks of 16 bytes per thread. Eight lanes have a chunk of eight rows,
// which padding spreads over the banks; a warp still reads full sectors.
struct RowsTile {
  static constexpr bool kDown = false;
  Bytes16 held[2];

  __device__ static __forceinline__ unsigned row(unsigned thread) { return thread / 32 * 8 + thread % 8; }
  __device__ static __forceinline__ unsigned chunk(unsigned thread) { return thread % 32 / 8; }

  __device__ __forceinline__ void fetch(const ByteMatrix& x, int row0, int step) {
    const unsigned thread = fresh_tid();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      held[i] = load16(x, row0 + row(thread) + 64 * i, step * 2 * kBlockK + 16 * chunk(thread));
  }
  __device__ __forceinline__ void stash(Element* s_tile) const {
    const unsigned thread = fresh_tid();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& word = held[i].word;
      *reinterpret_cast<uint4*>(s_tile + (row(thread) + 64 * i) * kStride + 8 * chunk(thread)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// Contiguous along n: [32 k][256 bytes], two chunks per thread.
struct DownTile {
  static constexpr bool kDown = true;
  Bytes16 held[2];

  __device__ __forceinline__ void fetch(const ByteMatrix& x, int column0, int step) {
    const unsigned thread = fresh_tid();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      held[i] = load16(x, step * kBlockK + thread / 16 + 16 * i, 2 * column0 + 16 * (thread % 16));
  }
  __device__ __forceinline__ void stash(Element* s_tile) const {
    const unsigned thread = fresh_tid();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& word = held[i].word;
      *reinterpret_cast<uint4*>(s_tile + (thread / 16 + 16 * i) * kDownStride + 8 * (thread % 16)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

using Sums = float[kRowTiles][kColumnTiles][8];

// s_x: the warp's rows. s_w: the tile; column: the warp's first.
template <bool kDown>
__device__ __forceinline__ void multiply(Sums& sums, const Element* s_x, const Element* s_w, int column) {
  using W = Wmma<Element>;
#pragma unroll
  for (int k = 0; k < kBlockK; k += 16) {
    typename W::Operand x[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) W::load_a(x[i], s_x + 16 * i * kStride + k, kStride);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      typename W::Operand w;
      if constexpr (kDown)
        W::load_b_row(w, s_w + k * kDownStride + column + 16 * j, kDownStride);
      else
        W::load_b_col(w, s_w + (column + 16 * j) * kStride + k, kStride);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        if constexpr (kDown)
          W::multiply_row(sums[i][j], x[i], w);
        else
          W::multiply_col(sums[i][j], x[i], w);
      }
    }
  }
}

// row0, column0: the warp's first row and column of out.
template <class Out>
__device__ __forceinline__ void store_as(const QfLinearParams& p, bool vector, int row0, int column0, const Sums& sums,
                                         float* s_slab) {
  const gemm::SlabColumns<Out, kActivation, float> columns(p, column0, threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) wmma_store_row(s_slab + 16 * j, sums[i][j], gemm::kSlabStride);
    __syncwarp();  // other lanes read what this one wrote
    columns.store(p, vector, row0 + 16 * i, s_slab);
    __syncwarp();  // read before the next 16 rows overwrite it
  }
}

}  // namespace gelu_linear_wmma
}  // namespace qf

template <class WTile>
__global__ void __launch_bounds__(qf::gelu_linear_wmma::kThreads, 2)
    qf_gelu_linear_wmma_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  using namespace qf;
  using namespace qf::gelu_linear_wmma;
  constexpr int kTile = kTileBytes / 2;  // elements
  extern __shared__ float4 s_memory[];
  Element* s_now = reinterpret_cast<Element*>(s_memory);  // being multiplied: x, then w
  Element* s_next = s_now + 2 * kTile;                    // being filled

  const gemm::Tile tile(grid, blockIdx.x, kBandRows);
  const int row0 = tile.row * kBlock, column0 = tile.column * kBlock, warp = threadIdx.x / 32;
  const int row = warp % kWarpsM * kWarpM, column = warp / kWarpsM * gemm::kWarpN;  // the warp's, in the tile
  const int steps = (int(p.k) + kBlockK - 1) / kBlockK;

  RowsTile x;
  WTile w;
  const auto fetch = [&](int step) { x.fetch(grid.x, row0, step), w.fetch(grid.w[0], column0, step); };
  const auto stash = [&](Element* s_buffer) { x.stash(s_buffer), w.stash(s_buffer + kTile); };

  Sums sums = {};
  if (steps > 0) {
    fetch(0);
    stash(s_now);
  }
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const bool more = step + 1 < steps;
    if (more) fetch(step + 1);
    multiply<WTile::kDown>(sums, s_now + row * kStride, s_now + kTile, column);
    if (more) stash(s_next);
    __syncthreads();
    Element* const s_swap = s_now;
    s_now = s_next, s_next = s_swap;
  }

  float* const s_slab = reinterpret_cast<float*>(s_memory) + warp * gemm::kSlabWords;
  if (p.out_dtype == QF_F32)
    store_as<float>(p, grid.vector_out, row0 + row, column0 + column, sums, s_slab);
  else
    store_as<Element>(p, grid.vector_out, row0 + row, column0 + column, sums, s_slab);
}
