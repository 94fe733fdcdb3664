// TMA, the copy engine: loads boxes of tensors that a map describes from global to shared memory, swizzled on the way,
// with zeros where the box exceeds the tensor; stores boxes, where nothing is written outside the tensor; and copies
// contiguous bytes. sm_90.
#pragma once

#include "ptx/mbarrier.cuh"

namespace qf {

// Prefetches a tensor map into the descriptor cache. The map lives in the kernel's parameters or in global memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// Loads the box at (c0, c1, c2, c3) of the map's tensor, innermost first; its bytes arrive at s_barrier. One thread
// calls it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void copy_box(void* s_to, const void* map, int c0, int c1, int c2, int c3,
                                         Mbarrier* s_barrier) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(s_to)),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(s_barrier))
      : "memory");
#elif defined(QF_EMULATOR)
  emulate::copy_box(s_to, map, {c0, c1, c2, c3}, s_barrier);
#endif
}

// Multicast: the same to every block of the cluster whose bit is set in `blocks`, whether or not this one is among
// them: to the address of s_to in each, where the bytes arrive at the barrier at the address of s_barrier. L2 is read
// once.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void copy_box_to(uint16_t blocks, void* s_to, const void* map, int c0, int c1, int c2,
                                            int c3, Mbarrier* s_barrier) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(s_to)),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(s_barrier)), "h"(blocks)
      : "memory");
#elif defined(QF_EMULATOR)
  emulate::copy_box_to(blocks, s_to, map, {c0, c1, c2, c3}, s_barrier);
#endif
}

// Stores a box from shared memory to (c0, c1, c2, c3) of the map's tensor. The threads that wrote it have fenced
// (fence_proxy_async), and then synchronized with the calling thread. One thread calls it, and only it can wait.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void store_box(const void* map, int c0, int c1, int c2, int c3, const void* s_from) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(s_from))
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::store_box(map, {c0, c1, c2, c3}, s_from);
#endif
}

// Closes a group: every store of this thread since the last one.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-commit-group
__device__ __forceinline__ void commit_stores() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::commit_stores();
#endif
}

// Waits until TMA has read all but kPending groups of this thread's stores: shared memory may then be overwritten, or
// released.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#elif defined(QF_EMULATOR)
  emulate::wait_stores_read(kPending);
#endif
}

// Copies `bytes` contiguous bytes unchanged; addresses and `bytes` are multiples of 16. They arrive at s_barrier. One
// thread calls it.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
__device__ __forceinline__ void copy_bytes(void* s_to, const void* g_from, int bytes, Mbarrier* s_barrier) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(s_to)),
               "l"(g_from), "r"(bytes), "r"(shared_address(s_barrier))
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::copy_bytes(s_to, g_from, bytes, s_barrier);
#endif
}

// Orders this thread's ordinary accesses to shared memory before later ones by TMA and wgmma.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar-fence
__device__ __forceinline__ void fence_proxy_async() {
#ifdef __CUDA_ARCH__
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif defined(QF_EMULATOR)
  emulate::fence_proxy_async();
#endif
}

}  // namespace qf
