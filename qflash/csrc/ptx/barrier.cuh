// Named barriers, for some of a block's warps.
#pragma once

namespace qf {

// Waits until kThreads threads, in full warps, have arrived at barrier kId (1 to 15; 0 is __syncthreads). What they
// wrote to memory before it is visible to all of them after it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  static_assert(kId > 0 && kId < 16 && kThreads % 32 == 0, "");
#ifdef __CUDA_ARCH__
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
#elif defined(QF_EMULATOR)
  emulate::named_barrier_sync(kId, kThreads);
#endif
}

// Arrives at barrier kId as one of kThreads, without waiting.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_arrive() {
  static_assert(kId > 0 && kId < 16 && kThreads % 32 == 0, "");
#ifdef __CUDA_ARCH__
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
#elif defined(QF_EMULATOR)
  emulate::named_barrier_arrive(kId, kThreads);
#endif
}

// Like barrier_sync<kId, kThreads>(), for a barrier whose number is a run-time value.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int id) {
  static_assert(kThreads % 32 == 0, "");
#ifdef __CUDA_ARCH__
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
#elif defined(QF_EMULATOR)
  emulate::named_barrier_sync(id, kThreads);
#endif
}

}  // namespace qf
