// atom: read, change and write one word of global memory, in order with what comes before and after.
#pragma once

namespace qf {

// The word before; then it is 0 where that was `last`, else one more. What this block's threads wrote before a barrier
// that this thread has passed is seen by whoever reads the new word this way, and the other way round.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-atom
__device__ __forceinline__ unsigned atom_inc_in_order(unsigned* address, unsigned last) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 700
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(last) : "memory");
  return before;
#endif
#else
  return atomicInc(address, last);
#endif
}

}  // namespace qf
