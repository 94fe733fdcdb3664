// Barriers with a number, for some of a block's warps.
#pragma once

namespace qf {

// Until kThreads threads, whole warps, have come to barrier kId (1 to 15; 0 is __syncthreads). What they wrote to
// memory before it, they see after it.
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

// Comes to barrier kId as one of kThreads, and does not wait.
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

// As barrier_sync<kId, kThreads>(), of a barrier whose number is known at run time.
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
