// mov: a copy that is opaque to the compiler.
#pragma once

#include <stdint.h>

namespace qf {

// x, as a value of unknown origin: what was computed from x before is recomputed rather than kept in registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mov
__device__ __forceinline__ uint32_t fresh(uint32_t x) {
#ifdef __CUDA_ARCH__
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  return x;
#endif
}

}  // namespace qf
