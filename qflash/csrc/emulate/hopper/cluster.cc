#include "emulate/hopper/cluster.h"

#include <algorithm>
#include <string>

#include "emulate/complaint.h"
#include "emulate/hopper/copy.h"
#include "emulate/hopper/mbarrier.h"

namespace emulate {

void cluster_arrive() {
  ThreadState& own = own_state();
  ClusterBarrier& barrier = hopper.cluster;
  if (own.arrived) fail("it arrives at the barrier of its cluster twice");
  own = {own.store_groups, barrier.generation, true};
  barrier.last = std::max(barrier.last, now());
  if (++barrier.arrived < cluster_blocks * block_threads) return;
  barrier.arrived = 0;
  ++barrier.generation;
  barrier.completed = barrier.last;
}

void cluster_wait() {
  ThreadState& own = own_state();
  if (!own.arrived) fail("it waits at the barrier of its cluster, and did not arrive there");
  Condition condition;
  condition.happened = [](const void* object, unsigned before) {
    return static_cast<const ClusterBarrier*>(object)->generation != before;
  };
  condition.name = [](const void* object, unsigned) {
    return "the barrier of the cluster (" + std::to_string(static_cast<const ClusterBarrier*>(object)->arrived) +
           " threads have come)";
  };
  condition.object = &hopper.cluster;
  condition.argument = own.generation;
  condition.since = [](const void* object, unsigned) { return static_cast<const ClusterBarrier*>(object)->completed; };
  const uint64_t begin = now();
  wait_for(condition);
  waited(begin, "cluster");
  own.arrived = false;
}

// The address that corresponds to s_pointer in another block.
static char* peer(const void* s_pointer, int rank) {
  if (rank < 0 || rank >= cluster_blocks) fail("its cluster has no block " + std::to_string(rank));
  if (block_is_done(rank)) fail("it reaches into block " + std::to_string(rank) + " of its cluster, which has ended");
  return shared_memory(rank) + shared_offset(s_pointer);
}

void mbarrier_arrive_at(uint64_t* s_barrier, int rank) {
  mbarrier_arrive(reinterpret_cast<uint64_t*>(peer(s_barrier, rank)), 0);
}

void copy_box_to(unsigned blocks, void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier) {
  if (blocks >> cluster_blocks) fail("a copy goes to blocks that its cluster does not have");
  for (int rank = 0; rank < cluster_blocks; ++rank)
    if (blocks >> rank & 1) copy_box(peer(s_to, rank), map, at, reinterpret_cast<uint64_t*>(peer(s_barrier, rank)));
}

}  // namespace emulate
