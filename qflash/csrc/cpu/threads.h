// The engine's own threads. Not OpenMP: libgomp's pool does not survive fork(), and Python programs fork.
#pragma once

#include <stdint.h>

#include "memory.h"

namespace qf {

// Does item `item`; returns QF_OK or a status. Must not throw and must not call parallel_for.
using ItemFunction = int (*)(void* context, int64_t item);

// Runs every item in [0, items), in increasing order of start, on up to `threads` threads (0: the default), of which
// the caller is one. Any number of threads may call at once. After an item fails the rest may be left out; the status
// of one failed item is returned.
int parallel_for(int64_t items, int32_t threads, ItemFunction function, void* context);

// parallel_for for a callable: int callable(int64_t item). Only for sources that are compiled once, not per ISA.
template <class Callable>
int parallel_for(int64_t items, int32_t threads, Callable& callable) {
  return parallel_for(
      items, threads, [](void* context, int64_t item) { return (*static_cast<Callable*>(context))(item); }, &callable);
}

// How many threads a call with num_threads = `threads` uses.
int32_t resolve_threads(int32_t threads);

}  // namespace qf
