// From sums to out: out[i, j] = activation(h) + residual[i, j], rounded once. Of integers h = fma(float(sum) *
// x_scale[i], w_scale[j], bias[j]), which every engine computes so: without an activation CPU and GPU agree to the bit.
// Of floats h = sum + bias[j]. The activation is one of the library's: -DQF_ACTIVATION.
#pragma once

#include <type_traits>

#include "common/elements.cuh"
#include "gemm/activation.cuh"
#include "qflash_ops.h"

namespace qf {
namespace gemm {

// The type of out, by QfDtype or QfOpDtype.
template <int kDtype>
struct OutOf : ElementOf<kDtype> {};
template <>
struct OutOf<QF_I32> {
  using Type = int32_t;
};

__device__ __forceinline__ float row_scale(const QfLinearParams& p, int row) {
  return p.x_scale ? p.x_scale[row * p.x_scale_stride] : 1.0f;
}

// Element `at` of an array of QF_F32, QF_F16 or QF_BF16.
__device__ __forceinline__ float element(const void* g_array, int dtype, int64_t at) {
  if (dtype == QF_F32) return static_cast<const float*>(g_array)[at];
  return dtype == QF_F16 ? to_float(static_cast<const F16*>(g_array)[at])
                         : to_float(static_cast<const BF16*>(g_array)[at]);
}

// Scale and bias of kCount neighbouring columns.
template <int kCount>
struct Columns {
  float scale[kCount], bias[kCount];

  __device__ __forceinline__ Columns(const QfLinearParams& p, int first) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool inside = first + j < p.n;
      scale[j] = p.w_scale && inside ? p.w_scale[(first + j) * p.w_scale_stride] : 1.0f;
      bias[j] = p.bias && inside ? element(p.bias, p.bias_dtype, first + j) : 0.0f;
    }
  }
};

// h of a sum.
__device__ __forceinline__ float pre_activation(int32_t sum, float x_scale, float w_scale, float bias) {
  return fmaf(float(sum) * x_scale, w_scale, bias);
}
__device__ __forceinline__ float pre_activation(float sum, float, float, float bias) { return sum + bias; }

// The bits of an element of out.
__device__ __forceinline__ uint32_t bits_of(float value, float) { return float_to_bits(value); }
template <class Half>
__device__ __forceinline__ uint32_t bits_of(float value, Half out) {
  from_float(value, out);
  return out.bits;
}

__device__ __forceinline__ void store_vector(void* g_out, const uint32_t (&word)[4]) {
  *static_cast<uint4*>(g_out) = make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ __forceinline__ void store_vector(void* g_out, const uint32_t (&word)[2]) {
  *static_cast<uint2*>(g_out) = make_uint2(word[0], word[1]);
}
template <class Out>
__device__ __forceinline__ void store_element(Out* g_out, uint32_t bits) {
  if constexpr (sizeof(Out) == 4)
    *reinterpret_cast<uint32_t*>(g_out) = bits;
  else
    g_out->bits = uint16_t(bits);
}

// kCount elements of a row of out or of pre, 8 or 16 bytes, as one vector where they lie inside and it is aligned.
template <class Out, int kCount>
__device__ __forceinline__ void store_bits(Out* g_out, bool vector, int inside, const uint32_t (&bits)[kCount]) {
  constexpr int kPerWord = 4 / sizeof(Out);
  if (vector && inside >= kCount) {
    uint32_t word[kCount / kPerWord];
#pragma unroll
    for (int j = 0; j < kCount; j += kPerWord) {
      word[j / kPerWord] = bits[j];
      if constexpr (kPerWord == 2) word[j / 2] |= bits[j + 1] << 16;
    }
    store_vector(g_out, word);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j < inside) store_element(g_out + j, bits[j]);
  }
}

// out[row][first ..+kCount] of type Out, and what the backward pass wants of it. `vector`: rows of out, residual and
// pre start on 16 bytes.
template <class Out, int kActivation, class Sum, int kCount>
__device__ __forceinline__ void store_columns(const QfLinearParams& p, bool vector, int row, int first,
                                              const Sum (&sums)[kCount], const Columns<kCount>& columns) {
  static_assert(kActivation != QF_SWIGLU, "SwiGLU has two sums an element");
  if (row >= p.m) return;
  const int inside = int(p.n) - first;
  const int64_t at = row * p.out_stride_m + first;
  uint32_t bits[kCount];
  if constexpr (std::is_same_v<Out, int32_t>) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) bits[j] = uint32_t(sums[j]);
  } else {
    const float x_scale = row_scale(p, row);
    float h[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) h[j] = pre_activation(sums[j], x_scale, columns.scale[j], columns.bias[j]);
    if (p.pre) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) bits[j] = bits_of(h[j], Out{});
      store_bits(static_cast<Out*>(p.pre) + row * p.n + first, vector, inside, bits);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) h[j] = activated<kActivation>(h[j], 0.0f);
    if (p.residual) {
      const Out* const g_residual = static_cast<const Out*>(p.residual) + row * p.residual_stride_m + first;
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (j < inside) h[j] += to_float(g_residual[j]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) bits[j] = bits_of(h[j], Out{});
  }
  store_bits(static_cast<Out*>(p.out) + at, vector, inside, bits);
}

}  // namespace gemm
}  // namespace qf
