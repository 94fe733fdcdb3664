// tid, nctaid: the thread's index and the number of blocks, reread at each use.
#pragma once

namespace qf {

// threadIdx.x. Volatile, so that nothing derived from it is hoisted out of a loop into registers that the loop needs
// more: repeating a handful of integer operations is cheaper than keeping forty addresses.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-tid
__device__ __forceinline__ int fresh_tid() {
#ifdef __CUDA_ARCH__
  int tid;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
  return tid;
#else
  return threadIdx.x;
#endif
}

// gridDim.x, read the same way.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-nctaid
__device__ __forceinline__ int fresh_blocks() {
#ifdef __CUDA_ARCH__
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
#else
  return int(gridDim.x);
#endif
}

}  // namespace qf
