// ld and st of 16 bytes of global memory, with cache hints.
#pragma once

#include <stdint.h>

namespace qf {

struct alignas(16) Word4 {
  uint32_t word[4];
};

// For data that is used once: it is not allocated in L1, which is left to data that is reused.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
__device__ __forceinline__ Word4 ld_no_allocate(const void* address) {
#ifdef __CUDA_ARCH__
  Word4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "l"(address)
               : "memory");
  return x;
#else
  return *static_cast<const Word4*>(address);
#endif
}

// For data that many rows use and no kernel writes meanwhile: kept in L1.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld-global-nc
__device__ __forceinline__ Word4 ld_constant(const void* address) {
#ifdef __CUDA_ARCH__
  Word4 x;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
      : "l"(address));
  return x;
#else
  return *static_cast<const Word4*>(address);
#endif
}

// For data that is not read again soon: evicted first from the caches.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
__device__ __forceinline__ void st_streaming(void* address, const Word4& x) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.word[0]), "r"(x.word[1]),
               "r"(x.word[2]), "r"(x.word[3])
               : "memory");
#else
  *static_cast<Word4*>(address) = x;
#endif
}

// One 16-byte store, where the compiler would split an assignment.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
__device__ __forceinline__ void st_global(void* address, const Word4& x) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.word[0]), "r"(x.word[1]),
               "r"(x.word[2]), "r"(x.word[3])
               : "memory");
#else
  *static_cast<Word4*>(address) = x;
#endif
}

}  // namespace qf
