// TMA, the copy engine: loads boxes of tensors into swizzled shared memory, and contiguous bytes. A copy arrives at
// once, or when no thread can go on without it: the schedule's seed decides.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// Performs the copy now, whenever it was started.
void perform(const BoxCopy& copy);

void copy_box(void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier);

void copy_bytes(void* s_to, const void* g_from, int bytes, uint64_t* s_barrier);

// Orders this thread's ordinary writes to shared memory before later accesses by TMA and wgmma.
void fence_proxy_async();

}  // namespace emulate
