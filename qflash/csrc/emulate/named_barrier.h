// Barriers with a number, for some of a block's warps (bar.sync).
#pragma once

#include <algorithm>
#include <string>

#include "emulate/complaint.h"
#include "emulate/trace.h"

namespace emulate {

struct NamedBarrier {
  int arrived;
  unsigned generation;       // how often everybody has come
  uint64_t last, completed;  // in the time of trace.h: the latest arrival, and that of the generation before
};
constexpr int kNamedBarriers = 16;
inline NamedBarrier named_barriers[kNamedBarriers];  // of this block

inline void named_barrier_sync(int id, int threads) {
  if (id < 1 || id >= kNamedBarriers) fail("barrier " + std::to_string(id) + " is not one of 1 to 15");
  NamedBarrier& barrier = named_barriers[id];
  const unsigned generation = barrier.generation;
  barrier.last = std::max(barrier.last, now());
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.completed = barrier.last;
  }
  Condition condition;
  condition.happened = [](const void* object, unsigned before) {
    return static_cast<const NamedBarrier*>(object)->generation != before;
  };
  condition.name = [](const void* object, unsigned) {
    const auto* const barrier = static_cast<const NamedBarrier*>(object);
    return "barrier " + std::to_string(barrier - named_barriers) + " (" + std::to_string(barrier->arrived) +
           " threads have come)";
  };
  condition.object = &barrier;
  condition.argument = generation;
  condition.since = [](const void* object, unsigned) { return static_cast<const NamedBarrier*>(object)->completed; };
  const uint64_t begin = now();
  wait_for(condition);
  waited(begin, "barrier " + std::to_string(id));
}

}  // namespace emulate
