// Elements of q, k, v and out: four at a time, from any of the three types, with 16-byte (float32) or 8-byte
// (16-bit types) accesses if the caller states that alignment allows it, otherwise one by one.
#pragma once

#include "common/element_types.h"
#include "ptx/cvt.cuh"

namespace qf {

// Four elements as stored in memory. They stay raw between load and use: a conversion would wait for the load early.
template <class Element>
struct Raw4 {
  using Type = uint2;
};
template <>
struct Raw4<float> {
  using Type = float4;
};

__device__ __forceinline__ float bits_to_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  memcpy(&x, &bits, 4);
  return x;
#endif
}

__device__ __forceinline__ uint32_t float_to_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
#endif
}

__device__ __forceinline__ float nan() { return bits_to_float(0x7fc00000u); }
__device__ __forceinline__ float infinity() { return bits_to_float(0x7f800000u); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(F16 x) { return cvt_f32_f16(x.bits); }
__device__ __forceinline__ float to_float(BF16 x) { return bits_to_float(uint32_t(x.bits) << 16); }

__device__ __forceinline__ void from_float(float x, float& y) { y = x; }
__device__ __forceinline__ void from_float(float x, F16& y) { y.bits = cvt_rn_f16_f32(x); }
// Round to nearest even in integers: cvt.rn.bf16.f32 exists only from sm_80 on.
__device__ __forceinline__ void from_float(float x, BF16& y) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  y.bits = uint16_t(x != x ? 0x7fc0u : rounded);
}

__device__ __forceinline__ float4 to_float4(const float4& raw, const float*) { return raw; }
template <class Element>
__device__ __forceinline__ float4 to_float4(const uint2& raw, const Element*) {
  return make_float4(to_float(Element{uint16_t(raw.x)}), to_float(Element{uint16_t(raw.x >> 16)}),
                     to_float(Element{uint16_t(raw.y)}), to_float(Element{uint16_t(raw.y >> 16)}));
}

__device__ __forceinline__ void pack(const float* x, float4& raw) { raw = make_float4(x[0], x[1], x[2], x[3]); }
template <class Element>
__device__ __forceinline__ void pack(const Element* x, uint2& raw) {
  raw.x = uint32_t(x[0].bits) | uint32_t(x[1].bits) << 16;
  raw.y = uint32_t(x[2].bits) | uint32_t(x[3].bits) << 16;
}

// Channels d .. d+3 of a row; zeros from `head_dim` on. `vector`: the row is aligned and head_dim is a multiple of 4.
template <class Element>
__device__ __forceinline__ typename Raw4<Element>::Type load4(const Element* g_row, int d, int head_dim, bool vector) {
  using Raw = typename Raw4<Element>::Type;
  Raw raw{};
  if (vector) {
    if (d < head_dim) raw = *reinterpret_cast<const Raw*>(g_row + d);
  } else {
    Element x[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (d + e < head_dim) x[e] = g_row[d + e];
    pack(x, raw);
  }
  return raw;
}

template <class Element>
__device__ __forceinline__ void store4(Element* g_row, int d, int head_dim, bool vector, const float (&x)[4]) {
  Element y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) from_float(x[e], y[e]);
  if (vector) {
    typename Raw4<Element>::Type raw;
    pack(y, raw);
    if (d < head_dim) *reinterpret_cast<typename Raw4<Element>::Type*>(g_row + d) = raw;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (d + e < head_dim) g_row[d + e] = y[e];
  }
}

// Four consecutive elements in shared memory, aligned for a vector access.
template <class Element>
__device__ __forceinline__ float4 read4(const Element* s_x) {
  return to_float4(*reinterpret_cast<const typename Raw4<Element>::Type*>(s_x), s_x);
}
template <class Element>
__device__ __forceinline__ void write4(Element* s_x, const float4& x) {
  const float value[4] = {x.x, x.y, x.z, x.w};
  Element y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) from_float(value[e], y[e]);
  pack(y, *reinterpret_cast<typename Raw4<Element>::Type*>(s_x));
}

__device__ __forceinline__ bool finite(const float4& x) {
  // A finite number times zero is zero; infinities and NaN give NaN, which propagates through the sum.
  const float zero = x.x * 0.0f + x.y * 0.0f + x.z * 0.0f + x.w * 0.0f;
  return zero == 0.0f;
}

}  // namespace qf
