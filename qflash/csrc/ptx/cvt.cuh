// cvt: float16, bfloat16 and E4M3 to and from float32, without cuda_fp16.h (which drags in libcu++ and doubles the
// compile time).
#pragma once

#include <stdint.h>
#ifndef __CUDA_ARCH__
#include <cmath>
#include <cstring>
#endif

namespace qf {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
#ifdef __CUDA_ARCH__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  _Float16 h;
  memcpy(&h, &bits, 2);
  return float(h);
#endif
}

// Round to nearest even; beyond 65504 to infinity.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint16_t cvt_rn_f16_f32(float x) {
  uint16_t bits;
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
  const _Float16 h = _Float16(x);
  memcpy(&bits, &h, 2);
#endif
  return bits;
}

// Two at once, `low` in the lower half. sm_80 and later have this instruction; earlier it takes two of the above.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return uint32_t(cvt_rn_f16_f32(low)) | uint32_t(cvt_rn_f16_f32(high)) << 16;
#endif
}

// bfloat16, two at once, round to nearest even. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto one = [](float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return one(low) | one(high) << 16;
#endif
}

// E4M3, two at once, `low` in the lower byte. Rounds to nearest even; values beyond 448, infinities included, become
// 448; NaN is 0x7f. sm_89 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint32_t cvt_rn_e4m3x2_f32(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  const auto one = [](float x) -> uint32_t {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fu;
    if (size < 0x3c800000u) return sign | uint32_t(nearbyintf(fabsf(x) * 512.0f));  // below 2^-6: multiples of 2^-9
    const uint32_t rounded = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    return sign | (rounded < 0x7eu ? rounded : 0x7eu);
  };
  return one(low) | one(high) << 8;
#endif
}

// Two E4M3 in the lower bytes to float16, which represents all of them exactly. sm_89 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(uint16_t(codes)));
  return pair;
#else
  const auto one = [](uint32_t code) -> uint32_t {
    const uint32_t sign = (code & 0x80u) << 8, size = code & 0x7fu;
    if (size == 0x7fu) return 0x7fffu;
    if (size < 8) return sign | cvt_rn_f16_f32(float(size) * 0x1p-9f);
    return sign | ((size << 7) + (8u << 10));  // exponents are 8 apart
  };
  return one(codes & 0xffu) | one(codes >> 8 & 0xffu) << 16;
#endif
}

// Four in a word, lowest first: the instruction twice, each filling half of the result.
__device__ __forceinline__ uint32_t cvt_rn_e4m3x4_f32(float x0, float x1, float x2, float x3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t word;
  asm("{.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return word;
#else
  return cvt_rn_e4m3x2_f32(x0, x1) | cvt_rn_e4m3x2_f32(x2, x3) << 16;
#endif
}

// The inverse, exactly: two words of two float16 each. The instruction twice, once per half. sm_89 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ void cvt_rn_f16x4_e4m3x4(uint32_t (&halves)[2], uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(halves[0]), "=r"(halves[1])
      : "r"(word));
#else
  for (int i = 0; i < 2; ++i) halves[i] = cvt_rn_f16x2_e4m3x2(word >> 16 * i & 0xffffu);
#endif
}

}  // namespace qf
