// The copy engine (TMA): boxes of tensors into swizzled shared memory, and runs of bytes. A copy arrives at once, or
// when no thread can go on without it: the schedule's seed says.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// Now, whenever it was started.
void perform(const BoxCopy& copy);

void copy_box(void* s_to, const void* map, const int (&at)[4], uint64_t* s_barrier);

void copy_bytes(void* s_to, const void* g_from, int bytes, uint64_t* s_barrier);

// This thread's ordinary writes to shared memory come before what the copy engine and wgmma do afterwards.
void fence_proxy_async();

}  // namespace emulate
