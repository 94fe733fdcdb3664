// Interaction of a cluster's blocks: they synchronize, arrive at each other's mbarriers, and multicast boxes to all of
// them. A block that has ended must not be accessed any more.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// This block's part of `s_memory`, by its rank in the cluster.
inline float4* own_shared() { return s_memory + rank_now() * kSharedWindow / sizeof(float4); }

void cluster_arrive();
void cluster_wait();

// Arrives at the barrier at the same offset as s_barrier in block `rank`.
void mbarrier_arrive_at(uint64_t* s_barrier, int rank);

// Multicast: to the offset of s_to in every block whose bit is set; the bytes arrive at the barrier at the offset of
// s_barrier there.
void copy_box_to(unsigned blocks, void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier);

}  // namespace emulate
