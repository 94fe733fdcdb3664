// Ways to keep ptxas from moving code, each a branch that is never taken: it cannot know that, and moves nothing
// across.
#pragma once

#include <stdint.h>

namespace qf {

// `never_negative`, and all that leads to it, is computed before this place where `seldom` holds, at the cost of a
// branch elsewhere.
__device__ __forceinline__ void compute_before_if(bool seldom, float never_negative) {
  if (seldom && __any_sync(0xffffffffu, never_negative < 0.0f)) __trap();
}

// False. What is loaded after this place is not loaded before it.
__device__ __forceinline__ bool never(int never_negative) { return __any_sync(0xffffffffu, never_negative < 0); }

// All that leads to these words is computed before this place. Not all of their bits are set in all of them.
template <int kWords>
__device__ __forceinline__ void compute_before(const uint32_t (&words)[kWords]) {
  uint32_t common = ~0u;
#pragma unroll
  for (int i = 0; i < kWords; ++i) common &= words[i];
  if (__any_sync(0xffffffffu, common == ~0u)) __trap();
}

}  // namespace qf
