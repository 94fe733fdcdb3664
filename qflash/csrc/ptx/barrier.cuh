// Barriers with a number, for some of a block's warps.
#pragma once

namespace qf {

// Until `threads` threads, whole warps, have come to barrier `id` (1 to 15; 0 is __syncthreads). What they wrote to
// memory before it, they see after it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
__device__ __forceinline__ void barrier_sync(int id, int threads) {
#ifdef __CUDA_ARCH__
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#elif defined(QF_EMULATOR)
  emulate::named_barrier_sync(id, threads);
#endif
}

}  // namespace qf
