// max: the greater of two numbers, or of packed 16-bit ones.
#pragma once

#include "ptx/cvt.cuh"

namespace qf {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
// What the instructions do to one half each; they exist from sm_80 on.
template <class ToFloat>
__device__ __forceinline__ uint32_t max_of_halves(uint32_t a, uint32_t b, ToFloat to_float) {
  const auto greater = [&](uint32_t x, uint32_t y) {
    const float left = to_float(x), right = to_float(y);
    return left != left || left < right ? y : x;
  };
  return greater(a & 0xffffu, b & 0xffffu) | greater(a >> 16, b >> 16) << 16;
}
#endif

// Of a NaN and a number, the number. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-max
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else
  return max_of_halves(a, b, [](uint32_t half) { return cvt_f32_f16(uint16_t(half)); });
#endif
}

// Of a NaN and a number, the number. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-max
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#else
  return max_of_halves(a, b, [](uint32_t half) {
    const uint32_t bits = half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  });
#endif
}

// Of a NaN and a number, NaN. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-max
__device__ __forceinline__ float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float x;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
#else
  return a != a || a > b ? a : b;
#endif
}

}  // namespace qf
