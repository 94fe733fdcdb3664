// Reductions over the lanes of a warp that share a row: all x of one y in smem/lanes.cuh's assignment of lane bits.
#pragma once

#include "smem/lanes.cuh"

namespace qf {

template <int X, class Combine>
__device__ __forceinline__ float reduce_across_x(float value, Combine combine) {
  value = combine(value, __shfl_xor_sync(0xffffffffu, value, 1));
  value = combine(value, __shfl_xor_sync(0xffffffffu, value, 4));
  value = combine(value, __shfl_xor_sync(0xffffffffu, value, 8));
  if (X == 16) value = combine(value, __shfl_xor_sync(0xffffffffu, value, 16));
  return value;
}

template <int X>
__device__ __forceinline__ float max_across_x(float value) {
  return reduce_across_x<X>(value, [](float a, float b) { return fmaxf(a, b); });
}

template <int X>
__device__ __forceinline__ float sum_across_x(float value) {
  return reduce_across_x<X>(value, [](float a, float b) { return a + b; });
}

}  // namespace qf
