// ex2: the exponential of the special-function unit.
#pragma once

#ifndef __CUDA_ARCH__
#include <cmath>
#endif

namespace qf {

// 2^x, relative error below 2^-22; results under 2^-126 are flushed to 0; 2^-inf = 0, NaN stays NaN.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float ex2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
#ifdef QF_EMULATOR
  emulate::spend(emulate::kExponentialTime, "exponentials");
#endif
  return exp2f(x);
#endif
}

}  // namespace qf
