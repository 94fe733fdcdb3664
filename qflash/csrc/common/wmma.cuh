// wmma (ptx/wmma.cuh) by element type.
#pragma once

#include "common/element_types.h"
#include "ptx/cvt.cuh"
#include "ptx/wmma.cuh"

namespace qf {

// Operands of one element type: 16 x 16 fragments and their operations.
template <class Element>
struct Wmma;
template <>
struct Wmma<F16> {
  using Operand = uint32_t[8];
  __device__ static __forceinline__ void load_a(Operand& a, const F16* s_a, int stride) {
    wmma_load_a_f16(a, s_a, stride);
  }
  __device__ static __forceinline__ void load_b_col(Operand& b, const F16* s_b, int stride) {
    wmma_load_b_col_f16(b, s_b, stride);
  }
  __device__ static __forceinline__ void load_b_row(Operand& b, const F16* s_b, int stride) {
    wmma_load_b_row_f16(b, s_b, stride);
  }
  __device__ static __forceinline__ void multiply_col(float (&c)[8], const Operand& a, const Operand& b) {
    wmma_mma_row_col_f16(c, a, b);
  }
  __device__ static __forceinline__ void multiply_row(float (&c)[8], const Operand& a, const Operand& b) {
    wmma_mma_row_row_f16(c, a, b);
  }
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return cvt_rn_f16x2_f32(low, high); }
};
template <>
struct Wmma<BF16> {
  using Operand = uint32_t[4];
  __device__ static __forceinline__ void load_a(Operand& a, const BF16* s_a, int stride) {
    wmma_load_a_bf16(a, s_a, stride);
  }
  __device__ static __forceinline__ void load_b_col(Operand& b, const BF16* s_b, int stride) {
    wmma_load_b_col_bf16(b, s_b, stride);
  }
  __device__ static __forceinline__ void load_b_row(Operand& b, const BF16* s_b, int stride) {
    wmma_load_b_row_bf16(b, s_b, stride);
  }
  __device__ static __forceinline__ void multiply_col(float (&c)[8], const Operand& a, const Operand& b) {
    wmma_mma_row_col_bf16(c, a, b);
  }
  __device__ static __forceinline__ void multiply_row(float (&c)[8], const Operand& a, const Operand& b) {
    wmma_mma_row_row_bf16(c, a, b);
  }
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return cvt_rn_bf16x2_f32(low, high); }
};

}  // namespace qf
