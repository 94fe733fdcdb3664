// Values that all lanes of a warp share, and what ptxas knows of that.
#pragma once

#include "ptx/tid.cuh"

namespace qf {

// x of lane 0: the same for the warp, so that ptxas knows it and may use a uniform register.
template <class Word>
__device__ __forceinline__ Word warp_uniform(Word x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// 0, of which ptxas does not know that it is the same for all lanes. What is loaded from an address that it knows to be
// uniform it moves to a uniform register, and waits for the load there and then; with this added to the address it does
// not.
__device__ __forceinline__ int zero_of_lane() { return fresh_tid() / 1024; }

}  // namespace qf
