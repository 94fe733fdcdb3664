// Names for what the emulator shows people, in complaints and traces. A GPU sees nothing of them.
#pragma once

#include "ptx/mbarrier.cuh"

namespace qf {

// Calls a barrier by the name of what it guards.
__device__ __forceinline__ void name_barrier(const Mbarrier* s_barrier, const char* name, int stage) {
#if !defined(__CUDA_ARCH__) && defined(QF_EMULATOR)
  emulate::name_barrier(s_barrier, name, stage);
#else
  (void)s_barrier, (void)name, (void)stage;
#endif
}

// Calls this thread's warp by what it does in the block, from here on.
__device__ __forceinline__ void name_role(const char* name, int index = -1) {
#if !defined(__CUDA_ARCH__) && defined(QF_EMULATOR)
  emulate::name_role(name, index);
#else
  (void)name, (void)index;
#endif
}

}  // namespace qf
