// The epilogue: out[i, j] = activation(h) + residual[i, j], rounded once. For integers h = fma(float(sum) * x_scale[i],
// w_scale[j], bias[j]), the same on every engine: without an activation, CPU and GPU agree bit for bit. For floats h =
// sum + bias[j]. SwiGLU has a second accumulator per element, from which u is computed as h is from the first. The
// activation is fixed when a kernel is compiled.
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

// Scale and bias of kCount neighbouring columns of the product with w, or with up.
template <int kCount>
struct Columns {
  float scale[kCount], bias[kCount];

  __device__ __forceinline__ Columns(const QfLinearParams& p, int first, bool up = false) {
    const float* const g_scale = up ? p.up_scale : p.w_scale;
    const int64_t stride = up ? p.up_scale_stride : p.w_scale_stride;
    const void* const g_bias = up ? p.up_bias : p.bias;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool inside = first + j < p.n;
      scale[j] = g_scale && inside ? g_scale[(first + j) * stride] : 1.0f;
      bias[j] = g_bias && inside ? element(g_bias, p.bias_dtype, first + j) : 0.0f;
    }
  }
};

// h from an accumulator.
__device__ __forceinline__ float pre_activation(int32_t sum, float x_scale, float w_scale, float bias) {
  return fmaf(float(sum) * x_scale, w_scale, bias);
}
__device__ __forceinline__ float pre_activation(float sum, float, float, float bias) { return sum + bias; }

__device__ __forceinline__ void store_vector(void* g_out, const uint32_t (&word)[4]) {
  *static_cast<uint4*>(g_out) = make_uint4(word[0], word[1], word[2], word[3]);
}
__device__ __forceinline__ void store_vector(void* g_out, const uint32_t (&word)[2]) {
  *static_cast<uint2*>(g_out) = make_uint2(word[0], word[1]);
}

// Results packed into 32-bit words: one 32-bit element, or two 16-bit ones.
template <class Out>
struct Words {
  static constexpr int kPerWord = 1;
  __device__ static __forceinline__ uint32_t of(const float* value) { return float_to_bits(*value); }
  __device__ static __forceinline__ uint32_t of(const int32_t* value) { return uint32_t(*value); }
  __device__ static __forceinline__ void store(Out* g_out, uint32_t word, int) {
    *reinterpret_cast<uint32_t*>(g_out) = word;
  }
};
template <class Half>
struct HalfWords {
  static constexpr int kPerWord = 2;
  __device__ static __forceinline__ void store(Half* g_out, uint32_t word, int which) {
    g_out->bits = uint16_t(word >> 16 * which);
  }
};
template <>
struct Words<F16> : HalfWords<F16> {
  __device__ static __forceinline__ uint32_t of(const float* value) { return cvt_rn_f16x2_f32(value[0], value[1]); }
};
template <>
struct Words<BF16> : HalfWords<BF16> {
  __device__ static __forceinline__ uint32_t of(const float* value) { return cvt_rn_bf16x2_f32(value[0], value[1]); }
};

// Stores kCount elements of a row of out or of pre, 8 or 16 bytes: as one vector if it is aligned and inside the row.
template <class Out, class Value, int kCount>
__device__ __forceinline__ void store_values(Out* g_out, bool vector, int inside, const Value (&value)[kCount]) {
  constexpr int kPerWord = Words<Out>::kPerWord;
  uint32_t word[kCount / kPerWord];
#pragma unroll
  for (int j = 0; j < kCount; j += kPerWord) word[j / kPerWord] = Words<Out>::of(value + j);
  if (vector && inside >= kCount) {
    store_vector(g_out, word);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j < inside) Words<Out>::store(g_out + j, word[j / kPerWord], j % kPerWord);
  }
}

// Loads kCount elements of a row, likewise; zeros past the last one.
template <class Element, int kCount>
__device__ __forceinline__ void load_values(float (&value)[kCount], const Element* g_row, bool vector, int inside) {
  constexpr int kBytes = kCount * int(sizeof(Element));
  alignas(16) Element x[kCount] = {};
  if (vector && inside >= kCount) {
    using Vector = std::conditional_t<kBytes == 16, uint4, uint2>;
    *reinterpret_cast<Vector*>(x) = *reinterpret_cast<const Vector*>(g_row);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (j < inside) x[j] = g_row[j];
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) value[j] = to_float(x[j]);
}

// Stores out[row][first ..+kCount] from h and, for SwiGLU only, u; also stores h and u if the backward pass needs them.
template <class Out, int kActivation, int kCount>
__device__ __forceinline__ void store_activated(const QfLinearParams& p, bool vector, int row, int first,
                                                float (&h)[kCount], const float (&u)[kCount]) {
  const int inside = int(p.n) - first;
  const int64_t at = row * p.n + first;  // in pre
  if (p.pre) store_values(static_cast<Out*>(p.pre) + at, vector, inside, h);
  if constexpr (kActivation == QF_SWIGLU)
    if (p.pre_up) store_values(static_cast<Out*>(p.pre_up) + at, vector, inside, u);
#pragma unroll
  for (int j = 0; j < kCount; ++j) h[j] = activated<kActivation>(h[j], u[j]);
  if (p.residual) {
    float residual[kCount];
    load_values(residual, static_cast<const Out*>(p.residual) + row * p.residual_stride_m + first, vector, inside);
#pragma unroll
    for (int j = 0; j < kCount; ++j) h[j] += residual[j];
  }
  store_values(static_cast<Out*>(p.out) + row * p.out_stride_m + first, vector, inside, h);
}

// Stores out[row][first ..+kCount] of type Out. `vector`: rows of out, residual and pre are aligned to 16 bytes.
template <class Out, int kActivation, class Sum, int kCount>
__device__ __forceinline__ void store_columns(const QfLinearParams& p, bool vector, int row, int first,
                                              const Sum (&sums)[kCount], const Columns<kCount>& columns) {
  static_assert(kActivation != QF_SWIGLU, "SwiGLU has two sums an element: store_gated");
  if (row >= p.m) return;
  if constexpr (std::is_same_v<Out, int32_t>) {
    store_values(static_cast<Out*>(p.out) + row * p.out_stride_m + first, vector, int(p.n) - first, sums);
  } else {
    const float x_scale = row_scale(p, row);
    float h[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) h[j] = pre_activation(sums[j], x_scale, columns.scale[j], columns.bias[j]);
    store_activated<Out, kActivation>(p, vector, row, first, h, h);
  }
}

// The same for SwiGLU: `gates` are accumulators of the product with w, `ups` of that with up, of the same columns.
template <class Out, class Sum, int kCount>
__device__ __forceinline__ void store_gated(const QfLinearParams& p, bool vector, int row, int first,
                                            const Sum (&gates)[kCount], const Sum (&ups)[kCount],
                                            const Columns<kCount>& of_gate, const Columns<kCount>& of_up) {
  if (row >= p.m) return;
  const float x_scale = row_scale(p, row);
  float h[kCount], u[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    h[j] = pre_activation(gates[j], x_scale, of_gate.scale[j], of_gate.bias[j]);
    u[j] = pre_activation(ups[j], x_scale, of_up.scale[j], of_up.bias[j]);
  }
  store_activated<Out, QF_SWIGLU>(p, vector, row, first, h, u);
}

}  // namespace gemm
}  // namespace qf
