// Reductions over the 32 lanes of a warp by shuffles; every lane gets the same result, bit for bit.
#pragma once

#include <stdint.h>
#ifndef __CUDA_ARCH__
#include <cstring>
#endif

namespace qf {

// `width`, here and below: groups of `width` neighbouring lanes, a power of two, are reduced separately.
template <class Combine>
__device__ __forceinline__ float reduce_warp(float value, Combine combine, int width = 32) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    if (step < width) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

__device__ __forceinline__ float max_of_warp(float value, int width = 32) {
  return reduce_warp(value, [](float a, float b) { return fmaxf(a, b); }, width);
}

__device__ __forceinline__ float sum_of_warp(float value, int width = 32) {
  return reduce_warp(value, [](float a, float b) { return a + b; }, width);
}

// Several numbers that are reduced together: State is a struct of 4-byte words, shuffled and selected word by word.
// combine(a, b) always gets the lower lane's state first, so that all lanes agree even if its rounding depends on the
// order of its arguments.
template <class State, class Combine>
__device__ __forceinline__ State reduce_warp(State state, Combine combine, int width = 32) {
  constexpr int kWords = sizeof(State) / 4;
  static_assert(sizeof(State) == 4 * kWords, "a state is made of whole words");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= width) break;
    const bool lower = (lane & step) == 0;
    uint32_t mine[kWords], first[kWords], second[kWords];
    memcpy(mine, &state, sizeof state);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, mine[i], step);
      first[i] = lower ? mine[i] : other;
      second[i] = lower ? other : mine[i];
    }
    State a, b;
    memcpy(&a, first, sizeof a);
    memcpy(&b, second, sizeof b);
    state = combine(a, b);
  }
  return state;
}

}  // namespace qf
