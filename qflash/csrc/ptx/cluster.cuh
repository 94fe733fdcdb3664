// Clusters: blocks that run concurrently on neighbouring SMs, and access each other's shared memory. sm_90. Arrivals at
// another block's barriers are in ptx/mbarrier.cuh, copies to several blocks in ptx/tma.cuh.
#pragma once

#include <stdint.h>

namespace qf {

// This block's rank in its cluster.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-cluster-ctarank
__device__ __forceinline__ uint32_t cluster_rank() {
#ifdef __CUDA_ARCH__
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#elif defined(QF_EMULATOR)
  return uint32_t(emulate::rank_now());
#else
  return 0;
#endif
}

// Arrives at the cluster barrier, without waiting. What this thread wrote before is visible to threads after their
// wait.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
__device__ __forceinline__ void cluster_arrive() {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::cluster_arrive();
#endif
}

// Waits until all threads of the cluster have arrived.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
__device__ __forceinline__ void cluster_wait() {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::cluster_wait();
#endif
}

// The dynamic shared memory of this block, which its kernel calls s_memory. On a GPU the name alone refers to it;
// emulated blocks that run together have a part each of the array of that name.
__device__ __forceinline__ char* own_shared(float4* s_memory) {
#if !defined(__CUDA_ARCH__) && defined(QF_EMULATOR)
  return reinterpret_cast<char*>(emulate::own_shared());
#else
  return reinterpret_cast<char*>(s_memory);
#endif
}

}  // namespace qf
