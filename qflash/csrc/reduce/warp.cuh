// Reductions over the 32 lanes of a warp; every lane gets the result.
#pragma once

namespace qf {

template <class Combine>
__device__ __forceinline__ float reduce_warp(float value, Combine combine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

__device__ __forceinline__ float max_of_warp(float value) {
  return reduce_warp(value, [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ float sum_of_warp(float value) {
  return reduce_warp(value, [](float a, float b) { return a + b; });
}

}  // namespace qf
