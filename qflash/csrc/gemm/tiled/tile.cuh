// One block computes one tile of out: all of a GEMM kernel on CUDA cores, for operands of any type and layout.
//
// Pipeline: fetch the next step's words into registers, multiply the current buffer, stash into the other one,
//   synchronize. One barrier per step is enough: the other buffer was last read before the previous barrier.
#pragma once

#include "gemm/schedule.cuh"
#include "gemm/tiled/load.cuh"
#include "ptx/dp4a.cuh"
#include "smem/lanes.cuh"

namespace qf {
namespace gemm {

// sum + a b, of words.
__device__ __forceinline__ int32_t multiply_add(uint32_t a, uint32_t b, int32_t sum) { return dp4a(a, b, sum); }
__device__ __forceinline__ float multiply_add(uint32_t a, uint32_t b, float sum) {
  return fmaf(bits_to_float(a), bits_to_float(b), sum);
}

// Eight words of one group: rows (columns) first ..+3 and first + 64 ..+3.
__device__ __forceinline__ void load_words(uint32_t (&word)[kOwn], const uint32_t* s_tile, int group, int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 four = *reinterpret_cast<const uint4*>(s_tile + place(group, first + 64 * half));
    word[4 * half] = four.x, word[4 * half + 1] = four.y, word[4 * half + 2] = four.z, word[4 * half + 3] = four.w;
  }
}

template <int kUnroll, class Sum>
__device__ __forceinline__ void multiply(Sum (&sums)[kOwn][kOwn], const uint32_t* s_x, const uint32_t* s_w, int row,
                                         int column) {
#pragma unroll(kUnroll)
  for (int group = 0; group < kGroups; ++group) {
    uint32_t a[kOwn], b[kOwn];
    load_words(a, s_x, group, row);
    load_words(b, s_w, group, column);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) sums[i][j] = multiply_add(a[i], b[j], sums[i][j]);
  }
}

// row, column: the thread's first, of out. SwiGLU: accumulators 0 .. 3 of a row are gates, 4 .. 7 ups of these columns.
template <class Out, class Config>
__device__ __forceinline__ void store_as(const QfLinearParams& p, bool vector, int row, int column,
                                         const typename Config::Sum (&sums)[kOwn][kOwn]) {
  constexpr bool kGated = Config::kGated;
#pragma unroll
  for (int half = 0; half < (kGated ? 1 : 2); ++half) {
    const int first = column + 64 * half;
    const Columns<4> columns(p, first), of_up(p, first, kGated);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const auto& own = sums[i];
      const int at = row + i % 4 + i / 4 * 64;
      const typename Config::Sum low[4] = {own[0], own[1], own[2], own[3]}, high[4] = {own[4], own[5], own[6], own[7]};
      if constexpr (kGated)
        store_gated<Out>(p, vector, at, first, low, high, columns, of_up);
      else
        store_columns<Out, Config::kActivation>(p, vector, at, first, half == 0 ? low : high, columns);
    }
  }
}

// s_memory: kTiledSharedBytes.
template <class Config, class LoadX, class LoadW>
__device__ __forceinline__ void multiply_tile(const QfLinearParams& p, const Grid& grid, uint32_t* s_memory) {
  uint32_t* s_now = s_memory;                  // being multiplied
  uint32_t* s_next = s_memory + kBufferWords;  // being filled

  const Tile tile(grid, blockIdx.x, kTiledBandRows);
  const int row0 = tile.row * kTiledBlock, column0 = tile.column * kTiledBlock;  // columns of w, and of up
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = 4 * (warp % 4 * 4 + Lanes<kLanesX>::y(lane)), column = 4 * (warp / 4 * 8 + Lanes<kLanesX>::x(lane));
  const int steps = (int(p.k) + Config::kStep - 1) / Config::kStep;

  LoadX x(&grid.x, steps, row0);
  LoadW w(grid.w, p.up ? steps / 2 : steps, column0);
  const auto fetch = [&](int step) { x.fetch(step), w.fetch(step); };
  const auto stash = [&](uint32_t* s_buffer) { x.stash(s_buffer), w.stash(s_buffer + kTileWords); };

  constexpr int kUnroll = LoadW::kSource == Source::kOne ? 4 : 2;  // a second matrix takes registers
  typename Config::Sum sums[kOwn][kOwn] = {}, of_runs[kOwn][kOwn] = {};
  const auto end_run = [&] {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
      for (int j = 0; j < kOwn; ++j) of_runs[i][j] += sums[i][j], sums[i][j] = 0;
  };
  if (steps > 0) {
    fetch(0);
    stash(s_now);
  }
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const bool more = step + 1 < steps;
    if (more) fetch(step + 1);
    multiply<kUnroll>(sums, s_now, s_now + kTileWords, row, column);
    if (Config::kInRuns && step % kRunSteps == kRunSteps - 1) end_run();
    if (more) stash(s_next);
    __syncthreads();
    uint32_t* const s_swap = s_now;
    s_now = s_next, s_next = s_swap;
  }

  if constexpr (Config::kInRuns) end_run();
  const auto& results = Config::kInRuns ? of_runs : sums;

  using Out = typename Config::Out;
  const int out_row = row0 + row, out_column = column0 / (Config::kGated ? 2 : 1) + column;
  if constexpr (!std::is_void_v<Out>)
    store_as<Out, Config>(p, grid.vector_out, out_row, out_column, results);
  else if (p.out_dtype == QF_F32)
    store_as<float, Config>(p, grid.vector_out, out_row, out_column, results);
  else
    store_as<typename Config::Element, Config>(p, grid.vector_out, out_row, out_column, results);
}

}  // namespace gemm
}  // namespace qf
