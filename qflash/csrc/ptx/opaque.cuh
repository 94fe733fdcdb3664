// Values whose origin is hidden from the compiler.
#pragma once

#include <stdint.h>

namespace qf {

// s_pointer, which points into shared memory. Addresses derived from it are computed from a register, not each time
// from the special registers that hold the start of shared memory: reading those takes longer than most uses.
__device__ __forceinline__ char* opaque_shared(char* s_pointer) {
#ifdef __CUDA_ARCH__
  uint32_t address = uint32_t(__cvta_generic_to_shared(s_pointer));
  asm volatile("" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
#else
  return s_pointer;
#endif
}

// x, in a register from here on: the compiler cannot rematerialise it.
template <class Word>
__device__ __forceinline__ Word opaque(Word x) {
  static_assert(sizeof x == 4, "one register");
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}
// The same for g_pointer, which points into global memory.
template <class T>
__device__ __forceinline__ const T* opaque_global(const T* g_pointer) {
#ifdef __CUDA_ARCH__
  size_t address = __cvta_generic_to_global(g_pointer);
  asm volatile("" : "+l"(address));
  return static_cast<const T*>(__cvta_global_to_generic(address));
#else
  return g_pointer;
#endif
}

}  // namespace qf
