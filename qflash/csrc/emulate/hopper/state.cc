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
  std::fill_n(reinterpret_cast<float*>(bytes), block_shared_bytes / sizeof(float), NAN);
  fenced = false;
}

Hopper hopper;

void Hopper::begin() {
  barriers.clear();
  unfenced.clear();
  async_memory.begin();
  in_flight.clear();
  times.clear();
  tensor_cores_free = copy_engine_free = launch_begin;
  for (auto& one : warpgroups) one = Warpgroup();
  std::fill_n(threads, block_threads, ThreadProducts());
}

Hopper& used_hopper() {
  if (extension != &hopper) {
    hopper.begin();
    extension = &hopper;
  }
  return hopper;
}

Warpgroup& own_warpgroup() { return used_hopper().warpgroups[threadIdx.x / 128]; }

ThreadProducts& own_products() { return used_hopper().threads[threadIdx.x]; }

}  // namespace emulate
