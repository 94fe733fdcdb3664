// CUDA's device functions, as far as the kernels use them. Masks of lanes are ignored: all lanes of a warp must take
// part, and a warp of which some do not is stuck.
#pragma once

#include "emulate/trace.h"
#include "emulate/warp.h"

inline float __fdividef(float x, float y) { return x / y; }
void __syncthreads();
inline int __syncthreads_or(int value) {
  emulate::or_sum[emulate::rank_now()] |= value != 0;
  __syncthreads();
  return emulate::or_result[emulate::rank_now()];
}
inline void __syncwarp() { emulate::wait_for(emulate::Waits::kWarp); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulate::gather(value)[(threadIdx.x % 32) ^ mask];
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulate::gather(value)[lane % 32];
}
template <class T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  const int lane = int(threadIdx.x % 32);
  return emulate::gather(value)[lane < lanes ? lane : lane - lanes];
}
inline unsigned __ballot_sync(unsigned, int value) {
  unsigned bits = 0;
  const auto all = emulate::gather(value);
  for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane] != 0) << lane;
  return bits;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __any_sync(unsigned, int value) { return __ballot_sync(~0u, value) != 0; }
inline int __all_sync(unsigned, int value) { return __ballot_sync(~0u, value) == ~0u; }
inline int atomicAdd(int* address, int value) {
  const int before = *address;
  *address = before + value;
  return before;
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned before = *address;
  *address = before >= last ? 0 : before + 1;
  return before;
}
inline unsigned atomicMax(unsigned* address, unsigned value) {
  const unsigned before = *address;
  *address = before > value ? before : value;
  return before;
}
inline void __threadfence() {}  // blocks run in sequence
void __trap();
