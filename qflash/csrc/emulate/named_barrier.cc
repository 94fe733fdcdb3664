#include "emulate/named_barrier.h"

#include <algorithm>
#include <string>

#include "emulate/complaint.h"
#include "emulate/trace.h"

namespace emulate {

void named_barrier_arrive(int id, int threads) {
  if (id < 1 || id >= kNamedBarriers) fail("barrier " + std::to_string(id) + " is not one of 1 to 15");
  NamedBarrier& barrier = named_barriers[rank_now()][id];
  barrier.last = std::max(barrier.last, now());
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.completed = barrier.last;
  }
}

void named_barrier_sync(int id, int threads) {
  if (id < 1 || id >= kNamedBarriers) fail("barrier " + std::to_string(id) + " is not one of 1 to 15");
  NamedBarrier& barrier = named_barriers[rank_now()][id];
  const unsigned generation = barrier.generation;
  named_barrier_arrive(id, threads);
  Condition condition;
  condition.happened = [](const void* object, unsigned before) {
    return static_cast<const NamedBarrier*>(object)->generation != before;
  };
  condition.name = [](const void* object, unsigned) {
    const auto* const barrier = static_cast<const NamedBarrier*>(object);
    return "barrier " + std::to_string((barrier - named_barriers[0]) % kNamedBarriers) + " (" +
           std::to_string(barrier->arrived) + " threads have come)";
  };
  condition.object = &barrier;
  condition.argument = generation;
  condition.since = [](const void* object, unsigned) { return static_cast<const NamedBarrier*>(object)->completed; };
  const uint64_t begin = now();
  wait_for(condition);
  waited(begin, "barrier " + std::to_string(id));
}

}  // namespace emulate
