// add on pairs of float16.
#pragma once

#include "ptx/cvt.cuh"

namespace qf {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-add
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
#else
  const auto half = [](uint32_t x, int i) { return cvt_f32_f16(uint16_t(x >> 16 * i)); };
  return cvt_rn_f16x2_f32(half(a, 0) + half(b, 0), half(a, 1) + half(b, 1));
#endif
}

}  // namespace qf
