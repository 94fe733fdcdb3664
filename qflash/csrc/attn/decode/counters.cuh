// Flags of blocks that pass a part of a unit to another block for merging (merge.cuh): two per block. They are 0
// between launches, as the counters of common/counters.cuh are.
#pragma once

#include "common/counters.cuh"

namespace qf {
namespace decode {

constexpr int kMostBlocks = 512;  // per grid
constexpr int kFlagsEach = 2 * kMostBlocks, kFlags = 1 << 19;
static __device__ unsigned merge_flags[kFlags];

struct Flags {
  int first;  // in merge_flags; -1: use `cleared`
  unsigned* cleared;

  bool was_cleared() const { return first < 0; }  // by a launch, which the kernel follows
  __device__ __forceinline__ unsigned* all() const { return first < 0 ? cleared : merge_flags + first; }
};

// memory: kFlagsEach flags of the caller's, cleared if the library has none left. Returns a cudaError_t.
inline int take_flags(cudaStream_t stream, int blocks, unsigned* memory, Flags& flags) {
  struct Merges;
  flags.cleared = memory;
  if (const int error = take_counters<Merges, 128, kFlagsEach, kFlags>(stream, 2 * blocks, flags.first)) return error;
  if (flags.first >= 0) return cudaSuccess;
  return cudaMemsetAsync(memory, 0, 2 * sizeof(unsigned) * blocks, stream);
}

}  // namespace decode
}  // namespace qf
