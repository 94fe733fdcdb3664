#include "emulate/hopper/copy.h"

#include <algorithm>
#include <cstring>

#include "emulate/complaint.h"
#include "emulate/hopper/mbarrier.h"
#include "emulate/hopper/swizzle.h"
#include "emulate/names.h"
#include "emulate/trace.h"

namespace emulate {

void perform(const BoxCopy& copy) {
  const TensorMap& map = copy.map;
  const size_t bytes = size_t(map.rows) * map.row_bytes;
  if (block_is_done(rank_of(copy.s_to))) complain("a copy reaches a block that has ended, " + at_byte(copy.s_to));
  async_memory.publish();
  if (!async_memory.knows(copy.s_to, bytes))
    complain("a copy writes over what a thread wrote, without a fence between (fence_proxy_async), " +
             at_byte(copy.s_to));
  if (copy.run) memcpy(copy.s_to, copy.run, bytes);
  for (int row = 0; row < copy.map.rows && !copy.run; ++row)
    for (int i = 0; i < map.row_bytes / map.stride[0]; ++i) {
      const int64_t at[4] = {copy.at[0] + i, copy.at[1] + row, copy.at[2], copy.at[3]};
      const char* from = map.base;
      bool inside = true;
      for (int dim = 0; dim < 4; ++dim) {
        inside &= at[dim] >= 0 && at[dim] < map.size[dim];
        from += at[dim] * map.stride[dim];
      }
      char* const to = shared_memory(rank_of(copy.s_to)) +
                       swizzled(shared_offset(copy.s_to), row, i * map.stride[0], 8 * map.row_bytes, map.row_bytes);
      if (inside)
        memcpy(to, from, map.stride[0]);
      else
        memset(to, 0, map.stride[0]);
    }
  memcpy(async_memory.bytes + cluster_offset(copy.s_to), copy.s_to, bytes);
  observe(Event::kCopyArrives, int64_t(bytes), copy.s_to);
  copy.barrier->bytes -= int32_t(bytes);
  complete_if_due(*copy.barrier);
}

// Performs the copy at once, or later: the schedule's seed decides.
static void start(const BoxCopy& copy, uint64_t* s_barrier) {
  const size_t bytes = size_t(copy.map.rows) * copy.map.row_bytes;
  if (hopper.unfenced.count(s_barrier)) fail("no fence (fence_mbarrier_init) since the mbarrier " + at_byte(s_barrier));
  if (int64_t(shared_offset(copy.s_to)) + int64_t(bytes) > block_shared_bytes) fail("a copy leaves shared memory");
  observe(Event::kCopyStarts, int64_t(bytes), copy.s_to);
  if (timed) {
    uint64_t& free = hopper.copy_engine_free[rank_now()];
    free = std::max(free, now()) + bytes / kCopyBytes;
    const uint64_t arrival = free + kCopyLatency;
    record("copy", threadIdx.x / 32, now(), arrival, barrier_name(s_barrier));
    note_arrival(*copy.barrier, arrival);
  }
  if (timed || (*order)() % 2)
    perform(copy);
  else
    used_hopper().in_flight.push_back(copy);
}

void copy_box(void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier) {
  const BoxCopy copy = {static_cast<char*>(s_to),
                        *static_cast<const TensorMap*>(map),
                        {at[0], at[1], at[2], at[3]},
                        &mbarrier(s_barrier)};
  if (!copy.map.base) fail("the tensor map was not encoded");
  if (shared_offset(s_to) % 1024) fail("a swizzled box begins " + at_byte(s_to) + ", not at whole 1024");
  if (at[0] * copy.map.stride[0] % 16)
    fail("a box begins at column " + std::to_string(at[0]) + ", not at whole 16 bytes");
  start(copy, s_barrier);
}

void copy_bytes(void* s_to, const void* g_from, int bytes, uint64_t* s_barrier) {
  BoxCopy copy = {static_cast<char*>(s_to), {}, {}, &mbarrier(s_barrier), g_from};
  copy.map.rows = 1, copy.map.row_bytes = bytes;
  if (shared_offset(s_to) % 16 || reinterpret_cast<uintptr_t>(g_from) % 16 || bytes % 16 || bytes <= 0)
    fail("a copy of " + std::to_string(bytes) + " bytes begins " + at_byte(s_to) +
         ", not whole 16 bytes on both sides");
  start(copy, s_barrier);
}

void fence_proxy_async() {
  used_hopper();
  async_memory.fenced = true;
}

}  // namespace emulate
