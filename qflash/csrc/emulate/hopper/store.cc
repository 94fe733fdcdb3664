#include "emulate/hopper/store.h"

#include <cstring>

#include "emulate/complaint.h"
#include "emulate/hopper/swizzle.h"

namespace emulate {

void perform(const BoxStore& store) {
  const TensorMap& map = store.map;
  if (block_is_done(rank_of(store.s_from)))
    complain("a store that nobody waited for was under way at the end of a block");
  async_memory.publish();
  if (!async_memory.knows(store.s_from, size_t(map.rows) * map.row_bytes))
    complain("a store reads what a thread wrote, without a fence between (fence_proxy_async), " +
             at_byte(store.s_from));
  const char* const bytes = async_memory.bytes + rank_of(store.s_from) * kSharedWindow;
  // As on an H200: the last 16 bytes of a row are written completely, even if the tensor ends within them.
  const int64_t size0 = (map.size[0] * map.stride[0] + 15) / 16 * 16 / map.stride[0];
  for (int row = 0; row < map.rows; ++row)
    for (int i = 0; i < map.row_bytes / map.stride[0]; ++i) {
      const int64_t at[4] = {store.at[0] + i, store.at[1] + row, store.at[2], store.at[3]};
      char* to = const_cast<char*>(map.base);
      bool inside = true;
      for (int dim = 0; dim < 4; ++dim) {
        inside &= at[dim] >= 0 && at[dim] < (dim == 0 ? size0 : map.size[dim]);
        to += at[dim] * map.stride[dim];
      }
      const unsigned from =
          swizzled(shared_offset(store.s_from), row, i * map.stride[0], 8 * map.row_bytes, map.row_bytes);
      if (inside) memcpy(to, bytes + from, size_t(map.stride[0]));
    }
}

void store_box(const void* map, const int (&at)[4], const void* s_from) {
  const BoxStore store = {static_cast<const char*>(s_from),
                          *static_cast<const TensorMap*>(map),
                          {at[0], at[1], at[2], at[3]},
                          fiber_now,
                          own_state().store_groups};
  if (!store.map.base) fail("the tensor map was not encoded");
  for (const int first : at)
    if (first < 0) fail("a store begins before its tensor, an illegal instruction on an H200");
  if (shared_offset(s_from) % 1024) fail("a swizzled box begins " + at_byte(s_from) + ", not at whole 1024");
  if (int64_t(shared_offset(s_from)) + store.map.rows * store.map.row_bytes > block_shared_bytes)
    fail("a store leaves shared memory");
  if (timed || (*order)() % 2)
    perform(store);
  else
    used_hopper().stores.push_back(store);
}

void commit_stores() { ++own_state().store_groups; }

void wait_stores_read(int pending) {
  struct Waiting {
    static bool done(const void* state, unsigned end) {
      const int thread = int(static_cast<const ThreadState*>(state) - hopper.states);
      for (const BoxStore& store : hopper.stores)
        if (store.thread == thread && store.group < end) return false;
      return true;
    }
  };
  ThreadState& own = own_state();
  Condition condition;
  condition.happened = Waiting::done;
  condition.name = [](const void*, unsigned) { return std::string("its stores to be read from shared memory"); };
  condition.object = &own;
  condition.argument = own.store_groups > unsigned(pending) ? own.store_groups - unsigned(pending) : 0;
  condition.since = [](const void*, unsigned) -> uint64_t { return 0; };
  wait_for(condition);
}

}  // namespace emulate
