#include "emulate/intrinsics.h"

#include "emulate/complaint.h"

void __syncthreads() {
  const uint64_t begin = emulate::now();
  emulate::wait_for(emulate::Waits::kBlock);
  emulate::waited(begin, "__syncthreads");
}

void __trap() { emulate::fail("a trap"); }
