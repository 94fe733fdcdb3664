#include "emulate/hopper/state.h"

#include <algorithm>
#include <cmath>

#include "emulate/names.h"
#include "emulate/trace.h"

namespace emulate {

std::string at_byte(const void* s_pointer) {
  const std::string name = barrier_name(s_pointer);
  return (name.empty() ? "" : "\"" + name + "\" ") + "at byte " + std::to_string(shared_offset(s_pointer)) +
         " of shared memory";
}

AsyncMemory async_memory;

void AsyncMemory::begin() {
  for (int rank = 0; rank < cluster_blocks; ++rank)
    std::fill_n(reinterpret_cast<float*>(bytes + rank * kSharedWindow), block_shared_bytes / sizeof(float), NAN);
  fenced = false;
}

Hopper hopper;

void Hopper::begin() {
  barriers.clear();
  unfenced.clear();
  async_memory.begin();
  in_flight.clear();
  stores.clear();
  cluster = ClusterBarrier();
  times.clear();
  std::fill_n(tensor_cores_free, kMostClusterBlocks, launch_begin);
  std::fill_n(copy_engine_free, kMostClusterBlocks, launch_begin);
  for (auto& one : warpgroups) one = Warpgroup();
  std::fill_n(threads, cluster_blocks * block_threads, ThreadProducts());
  std::fill_n(states, cluster_blocks * block_threads, ThreadState());
}

Hopper& used_hopper() {
  if (extension != &hopper) {
    hopper.begin();
    extension = &hopper;
  }
  return hopper;
}

Warpgroup& own_warpgroup() { return used_hopper().warpgroups[fiber_now / 128]; }

ThreadProducts& own_products() { return used_hopper().threads[fiber_now]; }

ThreadState& own_state() { return used_hopper().states[fiber_now]; }

}  // namespace emulate
