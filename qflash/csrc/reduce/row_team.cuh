// The team that processes a row: a warp (several rows per block, no barrier), or a block.
#pragma once

#include "reduce/block.cuh"

namespace qf {

// Blocks of a launch over rows. `first`: the first row of this launch.
struct RowGrid {
  int64_t first, blocks;
};

// One warp; kWarps rows per block.
struct WarpTeam {
  static constexpr int kWarps = 4, kRowsPerBlock = kWarps, kMostThreads = 32 * kWarps;

  __device__ __forceinline__ int rank() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int size() const { return 32; }
  __device__ __forceinline__ int64_t row(const RowGrid& grid) const {
    return grid.first + int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  }
  // Between two reductions.
  __device__ __forceinline__ void meet() const {}

  // kForAll: whether threads other than the first need the result; of_warp as in reduce/block.cuh.
  template <bool kForAll = true, class State, class OfWarp>
  __device__ __forceinline__ State reduce(const State& state, OfWarp of_warp, const State&, uint32_t*) const {
    return of_warp(state, 32);
  }
};

// One block of any number of warps.
struct BlockTeam {
  static constexpr int kRowsPerBlock = 1, kMostThreads = 32 * kMostWarps;

  __device__ __forceinline__ int rank() const { return threadIdx.x; }
  __device__ __forceinline__ int size() const { return blockDim.x; }
  __device__ __forceinline__ int64_t row(const RowGrid& grid) const { return grid.first + blockIdx.x; }
  __device__ __forceinline__ void meet() const { __syncthreads(); }

  template <bool kForAll = true, class State, class OfWarp>
  __device__ __forceinline__ State reduce(const State& state, OfWarp of_warp, const State& identity,
                                          uint32_t* s_words) const {
    return reduce_block<kForAll>(state, of_warp, identity, s_words);
  }
};

}  // namespace qf
