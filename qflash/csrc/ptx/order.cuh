// Ways to keep ptxas from moving code. Each is a branch that is never taken: ptxas cannot know that, and moves nothing
// across it.
#pragma once

#include <stdint.h>

namespace qf {

// If `seldom`, `never_negative` and all that it depends on are computed before this point, at the cost of a branch
// otherwise.
__device__ __forceinline__ void compute_before_if(bool seldom, float never_negative) {
  if (seldom && __any_sync(0xffffffffu, never_negative < 0.0f)) __trap();
}

// False. Loads after this point are not moved before it.
__device__ __forceinline__ bool never(int never_negative) { return __any_sync(0xffffffffu, never_negative < 0); }

// All that these words depend on is computed before this point. They must not all have all of their bits set.
template <int kWords>
__device__ __forceinline__ void compute_before(const uint32_t (&words)[kWords]) {
  uint32_t common = ~0u;
#pragma unroll
  for (int i = 0; i < kWords; ++i) common &= words[i];
  if (__any_sync(0xffffffffu, common == ~0u)) __trap();
}

}  // namespace qf
