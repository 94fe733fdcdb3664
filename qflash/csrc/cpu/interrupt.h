// How a call that takes long is stopped from outside, as by Ctrl-C. The engine knows nothing of signals: whoever calls
// it may leave a question with its thread, which that thread, and no other, asks every so often while it works.
#pragma once

#include <stdint.h>

namespace qf {

struct Interrupt {
  bool (*asked_to_stop)(void* context);  // may take its time, and may call the engine
  void* context;
  int64_t next_ms = 0;  // when to ask again; 0: not known yet
};

// Makes `interrupt` (NULL: none) the question of this thread; returns the one before it.
Interrupt* exchange_interrupt(Interrupt* interrupt);

// Whether the parallel_for that this thread works for is being stopped. A task that takes more than some 50 ms asks
// now and then, and returns QF_INTERRUPTED if so. Costs no more than a look at a coarse clock.
bool interrupted();

}  // namespace qf
