// rcp: the reciprocal of the special-function unit.
#pragma once

namespace qf {

// 1 / x, off by at most one unit in the last place; 1 / 0 is an infinity, 1 / infinity is 0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
__device__ __forceinline__ float rcp(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

}  // namespace qf
