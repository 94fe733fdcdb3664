// Named barriers, for some of a block's warps (bar.sync, bar.arrive).
#pragma once

#include <cstdint>

#include "emulate/types.h"

namespace emulate {

struct NamedBarrier {
  int arrived;
  unsigned generation;       // how often all threads have arrived
  uint64_t last, completed;  // in the time of trace.h: the latest arrival, and that of the previous generation
};
constexpr int kNamedBarriers = 16;
inline NamedBarrier named_barriers[kMostClusterBlocks][kNamedBarriers];  // of the running blocks

void named_barrier_arrive(int id, int threads);
void named_barrier_sync(int id, int threads);

}  // namespace emulate
