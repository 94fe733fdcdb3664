// What blocks of a cluster do to each other: they meet, arrive at each other's mbarriers, and have boxes copied to all
// of them at once. A block that has ended must not be touched any more.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// This block's part of `s_memory`, and its place in the cluster.
inline float4* own_shared() { return s_memory + rank_now() * kSharedWindow / sizeof(float4); }

void cluster_arrive();
void cluster_wait();

// At the barrier that lies where s_barrier does, in block `rank`.
void mbarrier_arrive_at(uint64_t* s_barrier, int rank);

// To the same place in every block whose bit is set, where the bytes arrive at the barrier in the place of s_barrier.
void copy_box_to(unsigned blocks, void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier);

}  // namespace emulate
