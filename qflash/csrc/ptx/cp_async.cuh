// cp.async: copies from global to shared memory that bypass the registers and complete in groups. sm_80 and later.
#pragma once

#include <stdint.h>

namespace qf {

// 16 bytes, both addresses aligned to 16; zeros, and no read, where `valid` is false. Not cached in L1.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void cp_async_16(void* s_to, const void* g_from, bool valid) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(s_to))),
               "l"(g_from), "r"(valid ? 16 : 0)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::cp_async(s_to, g_from, 16, valid);
#endif
}

// 8 bytes, both addresses aligned to 8; zeros, and no read, where `valid` is false. Cached in L1, as the instruction
// requires below 16 bytes.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void cp_async_8(void* s_to, const void* g_from, bool valid) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(s_to))),
               "l"(g_from), "r"(valid ? 8 : 0)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::cp_async(s_to, g_from, 8, valid);
#endif
}

// 4 bytes, both addresses aligned to 4; zeros, and no read, where `valid` is false. Cached in L1, likewise.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void cp_async_4(void* s_to, const void* g_from, bool valid) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(s_to))),
               "l"(g_from), "r"(valid ? 4 : 0)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::cp_async(s_to, g_from, 4, valid);
#endif
}

// Closes a group: every copy this thread has issued since the last one.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-commit-group
__device__ __forceinline__ void cp_async_commit() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::cp_async_commit();
#endif
}

// Waits until at most kPending of this thread's groups are in flight. Other threads see the data after a barrier.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-wait-group
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#elif defined(QF_EMULATOR)
  emulate::cp_async_wait(kPending);
#endif
}

}  // namespace qf
