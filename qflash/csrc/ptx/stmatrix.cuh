// stmatrix: a warp writes four 8x8 matrices of 16-bit elements from mma fragments to shared memory: the inverse of
// ldmatrix. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned); r[i] of lane l is M_i[l / 4][2
// (l % 4) ..+1]. sm_90.
#pragma once

#include <stdint.h>

namespace qf {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
__device__ __forceinline__ void stmatrix_x4(void* s_row, const uint32_t (&r)[4]) {
#ifdef __CUDA_ARCH__
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   uint32_t(__cvta_generic_to_shared(s_row))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#elif defined(QF_EMULATOR)
  emulate::stmatrix(s_row, r);
#endif
}

}  // namespace qf
