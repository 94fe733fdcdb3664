// From exact int32 sums to out: out[i, j] = fma(float(sum) * a_scale[i], b_scale[j], bias[j]), rounded once more for
// the 16-bit types. Every engine computes exactly this, so CPU and GPU agree to the bit.
#pragma once

#include "common/elements.cuh"
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

__device__ __forceinline__ float row_scale(const QfInt8MatmulParams& p, int row) {
  return p.a_scale ? p.a_scale[row * p.a_scale_stride] : 1.0f;
}

// Scale and bias of kCount neighbouring columns.
template <int kCount>
struct Columns {
  float scale[kCount], bias[kCount];

  __device__ __forceinline__ Columns(const QfInt8MatmulParams& p, int first) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool inside = first + j < p.n;
      scale[j] = p.b_scale && inside ? p.b_scale[(first + j) * p.b_scale_stride] : 1.0f;
      bias[j] = p.bias && inside ? p.bias[first + j] : 0.0f;
    }
  }
};

// The bits of an element of out.
__device__ __forceinline__ uint32_t finish(int32_t sum, float, float, float, int32_t) { return uint32_t(sum); }
__device__ __forceinline__ uint32_t finish(int32_t sum, float a_scale, float b_scale, float bias, float) {
  return float_to_bits(fmaf(float(sum) * a_scale, b_scale, bias));
}
template <class Half>
__device__ __forceinline__ uint32_t finish(int32_t sum, float a_scale, float b_scale, float bias, Half out) {
  from_float(fmaf(float(sum) * a_scale, b_scale, bias), out);
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

// out[row][first ..+kCount] of type Out; kCount elements are 8 or 16 bytes.
template <class Out, int kCount>
__device__ __forceinline__ void store_columns(const QfInt8MatmulParams& p, bool vector, int row, int first,
                                              const int32_t (&sums)[kCount], const Columns<kCount>& columns) {
  constexpr int kPerWord = 4 / sizeof(Out);
  if (row >= p.m) return;
  const float a_scale = row_scale(p, row);
  uint32_t bits[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) bits[j] = finish(sums[j], a_scale, columns.scale[j], columns.bias[j], Out{});
  Out* const g_out = static_cast<Out*>(p.out) + row * p.out_stride_m + first;
  if (vector && first + kCount <= p.n) {
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
      if (first + j < p.n) store_element(g_out + j, bits[j]);
  }
}

}  // namespace gemm
}  // namespace qf
