// Warp-uniform values, and what ptxas knows of them.
#pragma once

#include "ptx/tid.cuh"

namespace qf {

// x of lane 0: the same for the warp, so that ptxas may use a uniform register.
template <class Word>
__device__ __forceinline__ Word warp_uniform(Word x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// 0, which ptxas does not know to be the same for all lanes. It loads from an address that it knows to be uniform into
// a uniform register, and waits for the load right there; with this added to the address it does not.
__device__ __forceinline__ int zero_of_lane() { return fresh_tid() / 1024; }

}  // namespace qf
