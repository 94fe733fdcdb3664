// TMA stores: boxes of swizzled shared memory to tensors. A box is read at once, or when no thread can go on without
// it: the schedule's seed decides. What lies outside the tensor is not written.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// Performs the store now, whenever it was started.
void perform(const BoxStore& store);

void store_box(const void* map, const int (&at)[4], const void* s_from);

void commit_stores();

// Waits until shared memory of all but the last `pending` groups of this thread has been read.
void wait_stores_read(int pending);

}  // namespace emulate
