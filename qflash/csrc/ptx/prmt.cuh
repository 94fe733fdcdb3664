// prmt: selects any four of eight bytes.
#pragma once

#include <stdint.h>

namespace qf {

// Byte i of the result is byte (selector >> 4 i) & 7 of the eight: 0..3 are x's from the lowest up, 4..7 are y's.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prmt
__device__ __forceinline__ uint32_t prmt(uint32_t x, uint32_t y, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
#else
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; ++i) z |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return z;
#endif
}

}  // namespace qf
