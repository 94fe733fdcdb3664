// ldmatrix: a warp reads four 8x8 matrices of 16-bit elements from shared memory into mma fragments. Lane l gives the
// address of row l % 8 of matrix l / 8 (16 bytes, aligned); r[i] of lane l is M_i[l / 4][2 (l % 4) ..+1]. Eight rows
// are read at once, so a read is free of bank conflicts if the 8 addresses of each matrix lie in different 16-byte bank
// groups.
#pragma once

#include <stdint.h>

namespace qf {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* s_row) {
#ifdef __CUDA_ARCH__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(s_row)))
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::ldmatrix(r, s_row, false);
#endif
}

// Transposed: r[i] of lane l is M_i[2 (l % 4)][l / 4] and M_i[2 (l % 4) + 1][l / 4].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* s_row) {
#ifdef __CUDA_ARCH__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(s_row)))
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::ldmatrix(r, s_row, true);
#endif
}

}  // namespace qf
