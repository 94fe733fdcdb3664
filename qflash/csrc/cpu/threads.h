// The engine's own threads. Not OpenMP: libgomp's pool does not survive fork(), and Python programs fork.
#pragma once

#include <stdint.h>

#include "memory.h"

namespace qf {

// Does task `task`; returns QF_OK or a status. Must not throw and must not call parallel_for.
using TaskFunction = int (*)(void* context, int64_t task);

// Runs every task in [0, tasks), in increasing order of start, on up to `threads` threads (0: the default), of which
// the caller is one. Any number of threads may call at once. After a task fails the rest may be left out; the status
// of one failed task is returned.
int parallel_for(int64_t tasks, int32_t threads, TaskFunction function, void* context);

// parallel_for for a callable: int callable(int64_t task). Only for sources that are compiled once, not per ISA.
template <class Callable>
int parallel_for(int64_t tasks, int32_t threads, Callable& callable) {
  return parallel_for(
      tasks, threads, [](void* context, int64_t task) { return (*static_cast<Callable*>(context))(task); }, &callable);
}

// How many threads a call with num_threads = `threads` uses.
int32_t resolve_threads(int32_t threads);

}  // namespace qf
