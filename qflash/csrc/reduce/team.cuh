// Reductions over teams: neighbouring threads of a block, a power of two of them, possibly of several warps.
#pragma once

#include <stdint.h>

namespace qf {

// values[i] <- their combination over the thread's team of `lanes`, for every thread of it. Groups of `alike`
// neighbours (a power of two) already hold the same values: this requires an idempotent combination, such as a maximum.
// Teams within a warp only shuffle. Larger ones synchronize at barriers, so every thread of the block must call;
// s_scratch has room for kCount values per warp.
template <int kCount, class T, class Combine>
__device__ __forceinline__ void reduce_team(T (&values)[kCount], int alike, int lanes, T* s_scratch, Combine combine) {
#pragma unroll 1
  for (int step = alike; step < min(lanes, 32); step *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = combine(values[i], __shfl_xor_sync(0xffffffffu, values[i], step));
  }
  if (lanes <= 32) return;
  const int warp = threadIdx.x / 32, first = warp & ~(lanes / 32 - 1);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s_scratch[warp * kCount + i] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = s_scratch[first * kCount + i];
#pragma unroll 1
  for (int other = first + 1; other < first + lanes / 32; ++other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = combine(values[i], s_scratch[other * kCount + i]);
  }
  __syncthreads();
}

}  // namespace qf
