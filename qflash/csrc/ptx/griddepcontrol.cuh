// griddepcontrol: programmatic dependent launch, for kernels that overlap with the previous one on their stream, if the
// launch requested it. Otherwise both instructions do nothing. sm_90 and later.
#pragma once

namespace qf {

// Waits until all grids that this one depends on are complete, and their writes are visible.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A grid that depends on this one may start once all blocks have executed this, or exited.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void let_next_grid_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace qf
