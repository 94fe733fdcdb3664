// fma of float32 that saturates; fma on pairs of 16-bit floats, to detect nonfinite numbers.
#pragma once

#include <math.h>
#include <stdint.h>

namespace qf {

// a b + c, rounded once and clamped to 0 .. 1; NaN becomes 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-fma
__device__ __forceinline__ float fma_saturated(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  float x;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
  return x;
#else
  const float x = fmaf(a, b, c);
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
#endif
}

// c + 0 x in both halves: c where x is finite, NaN where it is not. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-fma
__device__ __forceinline__ uint32_t add_zero_times_f16x2(uint32_t x, uint32_t c) {
#ifdef __CUDA_ARCH__
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(x), "r"(0));
  return c;
#elif defined(QF_EMULATOR)
  return emulate::add_zero_times(x, c, 0x7c00);
#else
  return c;
#endif
}

// The same for bfloat16.
__device__ __forceinline__ uint32_t add_zero_times_bf16x2(uint32_t x, uint32_t c) {
#ifdef __CUDA_ARCH__
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(c) : "r"(x), "r"(0));
  return c;
#elif defined(QF_EMULATOR)
  return emulate::add_zero_times(x, c, 0x7f80);
#else
  return c;
#endif
}

}  // namespace qf
