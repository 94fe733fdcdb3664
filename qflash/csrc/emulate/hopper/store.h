// The copy engine (TMA) on the way out: boxes of swizzled shared memory into tensors. A box is read at once, or when no
// thread can go on without it: the schedule's seed says. What lies outside the tensor is left out.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// Now, whenever it was started.
void perform(const BoxStore& store);

void store_box(const void* map, const int (&at)[4], const void* s_from);

void commit_stores();

// Until shared memory of all but the last `pending` groups of this thread has been read.
void wait_stores_read(int pending);

}  // namespace emulate
