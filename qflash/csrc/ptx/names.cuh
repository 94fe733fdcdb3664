// Names for the emulator's diagnostics and traces. They do not exist on a GPU.
#pragma once

#include "ptx/mbarrier.cuh"

namespace qf {

// Names a barrier after what it guards.
__device__ __forceinline__ void name_barrier(const Mbarrier* s_barrier, const char* name, int stage) {
#if !defined(__CUDA_ARCH__) && defined(QF_EMULATOR)
  emulate::name_barrier(s_barrier, name, stage);
#else
  (void)s_barrier, (void)name, (void)stage;
#endif
}

// Names this thread's warp after its role in the block, from here on.
__device__ __forceinline__ void name_role(const char* name, int index = -1) {
#if !defined(__CUDA_ARCH__) && defined(QF_EMULATOR)
  emulate::name_role(name, index);
#else
  (void)name, (void)index;
#endif
}

}  // namespace qf
