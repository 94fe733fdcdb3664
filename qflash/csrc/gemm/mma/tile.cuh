// One block computes one tile of out: all of a GEMM kernel on mma.sync, for operands of any type and layout.
//
// Pipeline: while step t is multiplied, steps t + 1 .. t + kStages - 1 are in flight. There is one barrier per step,
//   before its last quarter: by then every warp has read the last fragments of step t (they are read a quarter ahead,
//   the last ones before the barrier), and every thread's copies of step t + 1 have arrived; the barrier makes them
//   visible to all. After it, fragments may be read from the stage of t + 1, and copies go to the stage that held t.
//   Operands that cannot be copied asynchronously (gemm/mma/load.cuh) are held in registers from a step's start to its
//   barrier.
#pragma once

#include "gemm/mma/fragments.cuh"
#include "gemm/mma/load.cuh"
#include "gemm/mma/store.cuh"
#include "gemm/schedule.cuh"

namespace qf {
namespace gemm {

// s_stages: Shape::kSharedBytes.
template <class Config, class Shape, class LoadX, class LoadW>
__device__ __forceinline__ void multiply_tile(const QfLinearParams& p, const Grid& grid, char* s_stages) {
  constexpr int kStages = Shape::kStages, kQuarters = kStepBytes / kQuarterBytes, kXBytes = Shape::kBlockM * kStepBytes;
  constexpr int kElements = kStepBytes / int(sizeof(typename Config::Element));  // of k, per step
  const auto stage = [&](int index) { return s_stages + index * Shape::kStageBytes; };

  const Tile tile(grid, blockIdx.x, kBandRows);
  const int row0 = tile.row * Shape::kBlockM, column0 = tile.column * Shape::kBlockN;  // columns of w, and of up
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = (int(p.k) + kElements - 1) / kElements;

  LoadX x(&grid.x, steps, row0);
  LoadW w(grid.w, p.up ? steps / 2 : steps, column0);
  const auto fetch = [&](int step, char* s_stage) {
    if (step >= steps) return;
    x.fetch(step, s_stage), w.fetch(step, s_stage + kXBytes);
  };
  const auto stash = [&](int step, char* s_stage) {
    if (step >= steps) return;
    x.stash(s_stage), w.stash(s_stage + kXBytes);
  };
  const auto commit = [] {
    if constexpr (Config::kAsync) cp_async_commit();
  };
  const auto arrive = [] {
    if constexpr (Config::kAsync) cp_async_wait<kStages - 2>();
    __syncthreads();
  };

#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) {
    fetch(step, stage(step));
    stash(step, stage(step));
    commit();
  }
  arrive();

  // Fragments are read a quarter ahead where registers allow it.
  constexpr bool kAhead = Shape::kWarpM * kWarpN + 32 * LoadW::kHeldWords <= 32 * 128;
  using Operands = Fragments<Shape, LoadX::kDown, LoadW::kDown>;
  const unsigned s_a = Operands::first_of_a(warp, lane), s_b = Operands::first_of_b(warp, lane);
  Sums<Config, Shape> sums = {};
  Operands fragments[kAhead ? 2 : 1];
  int now = 0, next = 1, last = kStages - 1;  // stages of this step, of the next, and the one to be filled
  if constexpr (kAhead)
    if (steps > 0) fragments[0].load(stage(0), 0, s_a, s_b);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int coming = step + kStages - 1;
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      const bool ends = quarter == kQuarters - 1;
      if constexpr (!kAhead) fragments[0].load(stage(now), quarter, s_a, s_b);
      if (ends) {
        stash(coming, stage(last));
        arrive();
      }
      if constexpr (kAhead)
        if (!ends || step + 1 < steps)
          fragments[(quarter + 1) % 2].load(stage(ends ? next : now), (quarter + 1) % kQuarters, s_a, s_b);
      if (quarter == 0) {
        fetch(coming, stage(last));
        commit();
      }
      sums.add(fragments[kAhead ? quarter % 2 : 0]);
    }
    last = now, now = next;
    next = next + 1 == kStages ? 0 : next + 1;
  }

  // No barrier is needed: every warp read its last fragments before the last barrier. The stages become slabs.
  auto* const s_slab = reinterpret_cast<typename Config::Sum*>(s_stages) + warp * kSlabWords;
  const int warp_row = row0 + warp % Shape::kWarpsM * Shape::kWarpM,
            warp_column = column0 + warp / Shape::kWarpsM * kWarpN;
  store_out(p, grid.vector_out, warp_row, Config::kGated ? warp_column / 2 : warp_column, sums, s_slab, lane);
}

}  // namespace gemm
}  // namespace qf
