// How a long call is stopped from outside, as by Ctrl-C. The engine does not handle signals: its caller may register a
// callback with its thread, which only that thread calls, every so often while it works.
#pragma once

#include <stdint.h>

namespace qf {

struct Interrupt {
  bool (*asked_to_stop)(void* context);  // may take its time, and may call the engine
  void* context;
  int64_t next_ms = 0;  // when to call it again; 0: not known yet
};

// Makes `interrupt` (NULL: none) the callback of this thread; returns the previous one.
Interrupt* exchange_interrupt(Interrupt* interrupt);

// Whether the parallel_for that this thread works for is being stopped. A task that takes more than some 50 ms checks
// this now and then, and returns QF_INTERRUPTED if so. Costs no more than reading a coarse clock.
bool interrupted();

}  // namespace qf
