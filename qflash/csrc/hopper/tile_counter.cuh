// Counters for dynamic tile schedules (common/counters.cuh): zero again after every kernel that used one
// (TileSchedule::for_each).
#pragma once

#include "common/counters.cuh"

namespace qf {

constexpr int kStreamCounters = 1024, kTileCounters = 1 << 16;
static __device__ unsigned tile_counters[kTileCounters];

// The counter of a launch: an index into tile_counters, or -1. Returns a cudaError_t.
inline int take_tile_counter(cudaStream_t stream, int& counter) {
  struct Tiles;
  return take_counters<Tiles, kStreamCounters, 1, kTileCounters>(stream, 1, counter);
}

}  // namespace qf
