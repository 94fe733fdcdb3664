// ld and st of global memory for data that blocks of one grid exchange while they run. Scope: the GPU.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#pragma once

#include "ptx/ldst.cuh"

namespace qf {

// 16 aligned bytes, atomically: a reader sees all of a write or none of it. Not ordered with other accesses.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
__device__ __forceinline__ Word4 ld_relaxed(const void* address) {
#ifdef __CUDA_ARCH__
  uint64_t low, high;
  asm volatile("{\n.reg .b128 x;\nld.relaxed.gpu.global.b128 x, [%2];\nmov.b128 {%0, %1}, x;\n}"
               : "=l"(low), "=l"(high)
               : "l"(address)
               : "memory");
  return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
#else
  return *static_cast<const Word4*>(address);
#endif
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
__device__ __forceinline__ void st_relaxed(void* address, const Word4& x) {
#ifdef __CUDA_ARCH__
  const uint64_t low = x.word[0] | uint64_t(x.word[1]) << 32, high = x.word[2] | uint64_t(x.word[3]) << 32;
  asm volatile("{\n.reg .b128 x;\nmov.b128 x, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], x;\n}" ::"l"(address),
               "l"(low), "l"(high)
               : "memory");
#else
  *static_cast<Word4*>(address) = x;
#endif
}

// One word. A thread that acquires it sees what this thread, and those it has synchronized with, wrote before.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
__device__ __forceinline__ void st_release(unsigned* address, unsigned x) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
#else
  *address = x;
#endif
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
__device__ __forceinline__ unsigned ld_acquire(const unsigned* address) {
#ifdef __CUDA_ARCH__
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
#else
  return *address;
#endif
}

// Increments, and wraps to 0 after `last`; returns the previous count. What this thread and those it has synchronized
// with wrote before is visible to threads that count later, and to those that synchronize with them afterwards.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
__device__ __forceinline__ unsigned atomic_inc_acq_rel(unsigned* address, unsigned last) {
#ifdef __CUDA_ARCH__
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(last) : "memory");
  return before;
#else
  return atomicInc(address, last);
#endif
}

// Called between two polls of what another block is to write.
__device__ __forceinline__ void wait_for_blocks_before() {
#ifdef QF_EMULATOR
  emulate::fail("waits for what a block before it should have written");  // blocks run in sequence
#endif
}

}  // namespace qf
