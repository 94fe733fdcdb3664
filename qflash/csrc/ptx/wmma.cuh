// wmma: 16 x 16 x 16 products of a warp on the tensor cores, with matrices that full warps load and store. Which lane
// holds which element is unspecified: a fragment may only be loaded, multiplied, stored, and combined element by
// element with fragments of the same kind. `stride` counts elements from one row (or, `col`, one column) to the next
// and is a multiple of 8 (16-bit) or 4 (float32); addresses are aligned to 32 bytes. Operands of float16 hold each
// element twice, as Volta required; bfloat16 needs sm_80.
#pragma once

#include <stdint.h>

namespace qf {

// A, stored by rows in shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-wmma-ld
__device__ __forceinline__ void wmma_load_a_f16(uint32_t (&a)[8], const void* s_a, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]), "=r"(a[4]), "=r"(a[5]), "=r"(a[6]), "=r"(a[7])
               : "r"(uint32_t(__cvta_generic_to_shared(s_a))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load(a, s_a, stride);
#endif
}
__device__ __forceinline__ void wmma_load_a_bf16(uint32_t (&a)[4], const void* s_a, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(uint32_t(__cvta_generic_to_shared(s_a))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load(a, s_a, stride);
#endif
}

// B, stored by columns: element (k, n) at s_b[n * stride + k].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-wmma-ld
__device__ __forceinline__ void wmma_load_b_col_f16(uint32_t (&b)[8], const void* s_b, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]), "=r"(b[4]), "=r"(b[5]), "=r"(b[6]), "=r"(b[7])
               : "r"(uint32_t(__cvta_generic_to_shared(s_b))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load(b, s_b, stride);
#endif
}
__device__ __forceinline__ void wmma_load_b_col_bf16(uint32_t (&b)[4], const void* s_b, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(uint32_t(__cvta_generic_to_shared(s_b))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load(b, s_b, stride);
#endif
}

// B, stored by rows: element (k, n) at s_b[k * stride + n].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-wmma-ld
__device__ __forceinline__ void wmma_load_b_row_f16(uint32_t (&b)[8], const void* s_b, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]), "=r"(b[4]), "=r"(b[5]), "=r"(b[6]), "=r"(b[7])
               : "r"(uint32_t(__cvta_generic_to_shared(s_b))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load(b, s_b, stride);
#endif
}
__device__ __forceinline__ void wmma_load_b_row_bf16(uint32_t (&b)[4], const void* s_b, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(uint32_t(__cvta_generic_to_shared(s_b))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load(b, s_b, stride);
#endif
}

// C += A B. `row.col` or `row.row` must match how B was loaded.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-wmma-mma
__device__ __forceinline__ void wmma_mma_row_col_f16(float (&c)[8], const uint32_t (&a)[8], const uint32_t (&b)[8]) {
#ifdef __CUDA_ARCH__
  asm("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]),
        "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
#elif defined(QF_EMULATOR)
  emulate::wmma_multiply(c, a, b, true, emulate::from_f16);
#endif
}
__device__ __forceinline__ void wmma_mma_row_col_bf16(float (&c)[8], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
#ifdef __CUDA_ARCH__
  asm("wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
#elif defined(QF_EMULATOR)
  emulate::wmma_multiply(c, a, b, true, emulate::from_bf16);
#endif
}
__device__ __forceinline__ void wmma_mma_row_row_f16(float (&c)[8], const uint32_t (&a)[8], const uint32_t (&b)[8]) {
#ifdef __CUDA_ARCH__
  asm("wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, %12, %13, "
      "%14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(b[0]), "r"(b[1]),
        "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
#elif defined(QF_EMULATOR)
  emulate::wmma_multiply(c, a, b, false, emulate::from_f16);
#endif
}
__device__ __forceinline__ void wmma_mma_row_row_bf16(float (&c)[8], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
#ifdef __CUDA_ARCH__
  asm("wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]));
#elif defined(QF_EMULATOR)
  emulate::wmma_multiply(c, a, b, false, emulate::from_bf16);
#endif
}

// Accumulators from shared memory, stored by rows.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-wmma-ld
__device__ __forceinline__ void wmma_load_c_row(float (&c)[8], const float* s_c, int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]), "=f"(c[4]), "=f"(c[5]), "=f"(c[6]), "=f"(c[7])
               : "r"(uint32_t(__cvta_generic_to_shared(s_c))), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_load_sums(c, s_c, stride);
#endif
}

// Accumulators to shared memory, by rows, and by columns: element (m, n) at s_d[n * stride + m].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-wmma-st
__device__ __forceinline__ void wmma_store_row(float* s_d, const float (&d)[8], int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(
                   uint32_t(__cvta_generic_to_shared(s_d))),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]), "f"(d[4]), "f"(d[5]), "f"(d[6]), "f"(d[7]), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_store(s_d, d, stride, false);
#endif
}
__device__ __forceinline__ void wmma_store_col(float* s_d, const float (&d)[8], int stride) {
#ifdef __CUDA_ARCH__
  asm volatile("wmma.store.d.sync.aligned.col.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"(
                   uint32_t(__cvta_generic_to_shared(s_d))),
               "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]), "f"(d[4]), "f"(d[5]), "f"(d[6]), "f"(d[7]), "r"(stride)
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::wmma_store(s_d, d, stride, true);
#endif
}

}  // namespace qf
