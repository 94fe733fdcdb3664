// dp4a: a dot product of four int8 pairs on the CUDA cores.
#pragma once

#include <stdint.h>

namespace qf {

// c + sum of a[i] * b[i] over the four signed bytes of a and b.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#integer-arithmetic-instructions-dp4a
__device__ __forceinline__ int32_t dp4a(uint32_t a, uint32_t b, int32_t c) {
#ifdef __CUDA_ARCH__
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
  return c;
#else
  for (int i = 0; i < 4; ++i) c += int32_t(int8_t(a >> 8 * i)) * int32_t(int8_t(b >> 8 * i));
  return c;
#endif
}

}  // namespace qf
