// mbarrier: barriers in shared memory that count arrivals and, for TMA, the copy engine, bytes. A barrier alternates
// between two phases; a wait names the parity of the phase that it waits for. sm_90.
#pragma once

#include <stdint.h>

namespace qf {

using Mbarrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void* s_pointer) {
#ifdef __CUDA_ARCH__
  return uint32_t(__cvta_generic_to_shared(s_pointer));
#elif defined(QF_EMULATOR)
  return emulate::shared_offset(s_pointer);
#else
  return 0;
#endif
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-init
__device__ __forceinline__ void mbarrier_init(Mbarrier* s_barrier, int arrivals) {
#ifdef __CUDA_ARCH__
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(s_barrier)), "r"(arrivals) : "memory");
#elif defined(QF_EMULATOR)
  emulate::mbarrier_init(s_barrier, arrivals);
#endif
}

// Makes initialised barriers visible to TMA.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar-fence
__device__ __forceinline__ void fence_mbarrier_init() {
#ifdef __CUDA_ARCH__
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::fence_mbarrier_init();
#endif
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* s_barrier) {
#ifdef __CUDA_ARCH__
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(s_barrier)) : "memory");
#elif defined(QF_EMULATOR)
  emulate::mbarrier_arrive(s_barrier, 0);
#endif
}

// The same at the barrier at the address of s_barrier in block `rank` of the cluster, which may be this one. It signals
// that MMAs that read shared memory are complete, and publishes no writes of this thread to the other block: a release
// at cluster scope would wait for all memory of the GPU (MEMBAR.ALL.GPU).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
__device__ __forceinline__ void mbarrier_arrive_at(Mbarrier* s_barrier, uint32_t rank) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cta.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(s_barrier)),
      "r"(rank)
      : "memory");
#elif defined(QF_EMULATOR)
  emulate::mbarrier_arrive_at(s_barrier, int(rank));
#endif
}

// One arrival, and `bytes` more for TMA to transfer in this phase.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* s_barrier, int bytes) {
#ifdef __CUDA_ARCH__
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(s_barrier)),
               "r"(bytes)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::mbarrier_arrive(s_barrier, bytes);
#endif
}

// Has the phase of this parity completed? Sleeps until it has, for up to kPatience, before it returns false: a warp
// that polls takes issue slots from working warps.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier* s_barrier, uint32_t parity) {
#ifdef __CUDA_ARCH__
  constexpr uint32_t kPatience = 10000000;  // nanoseconds
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(s_barrier)), "r"(parity), "r"(kPatience)
      : "memory");
  return done != 0;
#elif defined(QF_EMULATOR)
  emulate::mbarrier_wait(s_barrier, parity);
  return true;
#else
  return false;
#endif
}

// The same, without waiting.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
__device__ __forceinline__ bool mbarrier_test(Mbarrier* s_barrier, uint32_t parity) {
#ifdef __CUDA_ARCH__
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(s_barrier)), "r"(parity)
      : "memory");
  return done != 0;
#elif defined(QF_EMULATOR)
  return emulate::mbarrier_test(s_barrier, parity);
#else
  return false;
#endif
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* s_barrier, uint32_t parity) {
  while (!mbarrier_try_wait(s_barrier, parity)) {
  }
}

}  // namespace qf
