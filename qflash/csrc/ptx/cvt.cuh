// cvt: float16 to and from float32, without cuda_fp16.h (which drags in libcu++ and doubles the compile time).
#pragma once

#include <stdint.h>
#ifndef __CUDA_ARCH__
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

}  // namespace qf
