// Counters of the blocks that are done with a unit that several share (common/counters.cuh): one for each block, used
// by the unit that it begins and does not end.
#pragma once

#include "common/counters.cuh"

namespace qf {
namespace decode {

constexpr int kMostBlocks = 512;  // of a grid
constexpr int kMergeCounters = 1 << 19;
static __device__ unsigned merge_counters[kMergeCounters];

struct Counters {
  int first;  // of merge_counters; -1: `cleared` are some
  unsigned* cleared;

  __device__ __forceinline__ unsigned* all() const { return first < 0 ? cleared : merge_counters + first; }
};

// memory: kMostBlocks counters of the caller's, cleared where the library has none left. Returns a cudaError_t.
inline int take_merge_counters(cudaStream_t stream, int blocks, unsigned* memory, Counters& counters) {
  struct Merges;
  counters.cleared = memory;
  if (const int error = take_counters<Merges, 128, kMostBlocks, kMergeCounters>(stream, blocks, counters.first))
    return error;
  if (counters.first >= 0) return cudaSuccess;
  return cudaMemsetAsync(memory, 0, sizeof(unsigned) * blocks, stream);
}

}  // namespace decode
}  // namespace qf
