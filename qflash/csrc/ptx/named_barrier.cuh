// The sixteen barriers of a block, by number, for some of its threads. Number 0 is __syncthreads().
#pragma once

namespace qf {

// Wait until `threads` threads have come here or to named_barrier_arrive with the same number.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar-barrier
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#elif defined(QF_EMULATOR)
  host::named_barrier_sync(number, threads);
#endif
}

// Be counted there without waiting.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar-barrier
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
#elif defined(QF_EMULATOR)
  host::named_barrier_arrive(number, threads);
#endif
}

}  // namespace qf
