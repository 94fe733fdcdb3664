// From float32 to int8 and its scale, defined bit for bit: docs/kernels/quantize.md, steps 3 to 5.
#pragma once

#include "common/elements.cuh"
#include "common/philox.cuh"
#include "common/rounded.cuh"
#include "qflash_ops.h"

namespace qf {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kNoAmplitude = 0x1p-100f;  // below it there is no scale

// |x| as an integer: ordered like the numbers, infinity above every number, NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float x) { return float_to_bits(x) & 0x7fffffffu; }

// What a token contributes to its group, as one integer whose maximum is taken: that it does not exist, that it is
// nonfinite, or its largest magnitude.
constexpr uint32_t kNoToken = 0, kNotFinite = 1, kFinite = 2;
__device__ __forceinline__ uint32_t token_key(uint32_t largest) {
  return largest < kInfinityBits ? kFinite + largest : kNotFinite;
}

struct Scale {
  float scale, inverse;
  float zero_point;  // an integer
};

// Symmetric scale of a group whose tokens' largest key is `key`.
__device__ __forceinline__ Scale symmetric_scale(uint32_t key) {
  if (key == kNotFinite) return {nan(), 0.0f, 0.0f};
  const float amplitude = key == kNoToken ? 0.0f : bits_to_float(key - kFinite);
  if (amplitude < kNoAmplitude) return {0.0f, 0.0f, 0.0f};
  return {div_rn(amplitude, 127.0f), div_rn(127.0f, amplitude), 0.0f};
}

// Asymmetric scale, for numbers from -below to above (both 0 or more). Halves, because the range itself may overflow.
__device__ __forceinline__ Scale asymmetric_scale(float above, float below, bool all_finite) {
  if (!all_finite) return {nan(), 0.0f, 0.0f};
  const float half_range = add_rn(mul_rn(0.5f, above), mul_rn(0.5f, below));
  if (half_range < kNoAmplitude) return {0.0f, 0.0f, 0.0f};
  const float inverse = div_rn(127.5f, half_range);
  const float zero_point = rintf(add_rn(-128.0f, mul_rn(below, inverse)));
  return {div_rn(half_range, 127.5f), inverse, fminf(fmaxf(zero_point, -128.0f), 127.0f)};
}

// 1.5 * 2^23: a float32 that this was added to has the nearest integer, ties to even, in its low bits.
constexpr float kIntegerInLowBits = 12582912.0f;

// floor(y), or the integer above it with probability equal to y's fraction, to within 2^-24.
__device__ __forceinline__ float round_stochastically(float y, uint32_t random) {
  const float below = floorf(y), fraction = sub_rn(y, below);
  const float uniform = mul_rn(float(random >> 8), 0x1p-24f);  // in [0, 1)
  return uniform < fraction ? below + 1.0f : below;
}

__device__ __forceinline__ uint32_t pack_low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#ifdef __CUDA_ARCH__
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#else
  return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
#endif
}

// Four integers: x times `inverse`, to nearest, if no clamp is needed: |x * 127 / max|x|| rounds to 127 at most.
__device__ __forceinline__ uint32_t nearest4(const float* x, float inverse) {
  uint32_t bits[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) bits[e] = float_to_bits(add_rn(mul_rn(x[e], inverse), kIntegerInLowBits));
  return pack_low_bytes(bits[0], bits[1], bits[2], bits[3]);
}

// Four integers. kPlain: to nearest, symmetric. `element`: index of x[0] in the tensor [batch, length, heads, head_dim]
// or [total, heads, head_dim]; a multiple of 4 when kAligned.
template <bool kPlain, bool kAligned>
__device__ __forceinline__ uint32_t round4(const float* x, const Scale& scale, const QfQuantizeParams& p,
                                           uint64_t element) {
  if constexpr (kPlain) {
    return nearest4(x, scale.inverse);
  } else {
    float n[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) n[e] = mul_rn(x[e], scale.inverse);
    if (p.rounding == QF_STOCHASTIC) {
      uint32_t random[4];
      philox4<kAligned>(random, element, p.seed);
#pragma unroll
      for (int e = 0; e < 4; ++e) n[e] = round_stochastically(n[e], random[e]);
    }
    const float lowest = p.symmetric ? -127.0f : -128.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      n[e] = add_rn(n[e], kIntegerInLowBits);  // exact from here on
      n[e] = fminf(fmaxf(n[e] + scale.zero_point, kIntegerInLowBits + lowest), kIntegerInLowBits + 127.0f);
    }
    return pack_low_bytes(float_to_bits(n[0]), float_to_bits(n[1]), float_to_bits(n[2]), float_to_bits(n[3]));
  }
}

template <bool kPlain, bool kAligned>
__device__ __forceinline__ uint2 round8(const float (&x)[8], const Scale& scale, const QfQuantizeParams& p,
                                        uint64_t element) {
  return make_uint2(round4<kPlain, kAligned>(x, scale, p, element),
                    round4<kPlain, kAligned>(x + 4, scale, p, element + 4));
}

}  // namespace qf
