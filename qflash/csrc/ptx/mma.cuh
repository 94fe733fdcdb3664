// mma.sync: one warp multiplies two small matrices on the tensor cores. With g = lane / 4 and t = lane % 4,
//   16-bit m16n8k16: a[i] holds A[g + 8 (i & 1)][2t + 8 (i >> 1) ..+1], b[i] holds B[2t + 8 i ..+1][g],
//   8-bit  m16n8k32: a[i] holds A[g + 8 (i & 1)][4t + 16 (i >> 1) ..+3], b[i] holds B[4t + 16 i ..+3][g],
//   c holds C[g][2t], C[g][2t+1], C[g+8][2t], C[g+8][2t+1].
// Turing's shapes are the same with half of k (f16) or half of k and of the rows (s8).
#pragma once

#include <stdint.h>

namespace qf {

// C += A B, float16 in, float32 accumulators. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(QF_EMULATOR)
  emulate::mma_16bit<2, emulate::from_f16>(c, a, {b0, b1});
#endif
}

// The same for bfloat16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(QF_EMULATOR)
  emulate::mma_16bit<2, emulate::from_bf16>(c, a, {b0, b1});
#endif
}

// C += A B with k = 8, float16 in, float32 accumulators: Turing's.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
__device__ __forceinline__ void mma_m16n8k8_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
#elif defined(QF_EMULATOR)
  emulate::mma_16bit<1, emulate::from_f16>(c, {a0, a1}, {b0});
#endif
}

// C += A B, int8 in, exact int32 accumulators. sm_80 and later.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
__device__ __forceinline__ void mma_m16n8k32_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif defined(QF_EMULATOR)
  emulate::mma_s8(c, a, {b0, b1});
#endif
}

// C += A B with 8 rows and k = 16, int8 in, exact int32 accumulators: Turing's. c0, c1 hold C[g][2t], C[g][2t+1].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
__device__ __forceinline__ void mma_m8n8k16_s8(int32_t& c0, int32_t& c1, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(c0), "+r"(c1)
      : "r"(a), "r"(b));
#elif defined(QF_EMULATOR)
  emulate::mma_m8n8k16_s8(c0, c1, a, b);
#endif
}

}  // namespace qf
