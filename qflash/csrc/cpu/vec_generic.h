// Vec in plain vector extensions: any machine, four lanes. See vec.h for the meanings.
#pragma once

#include <stdint.h>
#include <string.h>

namespace qf {
namespace QF_ISA {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t VecInt __attribute__((vector_size(16)));
constexpr int kLanes = 4;

static inline Vec zero() { return Vec{0, 0, 0, 0}; }
static inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
static inline Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline Vec load_part(const float* p, int n) {
  Vec x = zero();
  for (int i = 0; i < n; i++) x[i] = p[i];
  return x;
}
static inline void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }
static inline void store_part(float* p, Vec x, int n) {
  for (int i = 0; i < n; i++) p[i] = x[i];
}

static inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
static inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec vmin(Vec a, Vec b) { return a < b ? a : b; }
static inline float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
static inline float max(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

static inline VecInt bits_of(Vec x) {
  VecInt y;
  memcpy(&y, &x, sizeof y);
  return y;
}
static inline Vec from_bits(VecInt x) {
  Vec y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// Adding 1.5 * 2^23 leaves no room for a fraction; valid for |x| < 2^22.
static inline Vec round_nearest(Vec x) {
  const Vec shift = broadcast(12582912.0f);
  return (x + shift) - shift;
}
// p * 2^n for integral n in [-126, 127] and p in [1/2, 2), by adding to the exponent. NaN stays NaN.
static inline Vec scale_by_small_power(Vec p, Vec n) {
  const Vec safe = n == n ? n : zero();
  return from_bits(bits_of(p) + (__builtin_convertvector(safe, VecInt) << 23));
}
// p * 2^n for integral n in [-252, 254]: half the power at a time, so that the product may overflow properly.
static inline Vec scale_by_power(Vec p, Vec n) {
  const Vec safe = n == n ? n : zero();
  const VecInt power = __builtin_convertvector(safe, VecInt), half = power >> 1;
  return p * from_bits((half + 127) << 23) * from_bits((power - half + 127) << 23);
}
// Lanes of y where not a < b (so also where either is NaN), zero elsewhere.
static inline Vec zero_where_less(Vec a, Vec b, Vec y) { return a < b ? zero() : y; }
static inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return a < b ? yes : no; }
// Lanes [0, n) of x, the others of `rest`.
static inline Vec first_or(Vec x, int n, Vec rest) { return VecInt{n, n, n, n} > VecInt{0, 1, 2, 3} ? x : rest; }
static inline Vec copy_sign(Vec magnitude, Vec sign) {
  const VecInt bit = bits_of(broadcast(-0.0f));
  return from_bits((bits_of(magnitude) & ~bit) | (bits_of(sign) & bit));
}

// a0 b0 a1 b1 ... of the lower, and of the upper halves.
static inline Vec interleave_low(Vec a, Vec b) { return Vec{a[0], b[0], a[1], b[1]}; }
static inline Vec interleave_high(Vec a, Vec b) { return Vec{a[2], b[2], a[3], b[3]}; }

static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0);
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {  // zero or subnormal: fraction * 2^-24, exact in float32
    const float tiny = float(fraction) * 5.9604644775390625e-8f;
    memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline uint16_t f32_to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and up round to infinity
  if (magnitude < 0x38800000) {                       // below 2^-14: let the adder round to a multiple of 2^-24
    float y;
    memcpy(&y, &magnitude, 4);
    y += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &y, 4);
    return uint16_t(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1);
  return uint16_t(sign | rounded >> 13);
}
static inline uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x != x ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline Vec load_i8(const int8_t* p) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
static inline Vec load_f16(const uint16_t* p) {
  return Vec{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
static inline void store_f16(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; i++) p[i] = f32_to_f16(x[i]);
}
static inline Vec load_bf16(const uint16_t* p) {
  return from_bits(VecInt{int32_t(uint32_t(p[0]) << 16), int32_t(uint32_t(p[1]) << 16), int32_t(uint32_t(p[2]) << 16),
                          int32_t(uint32_t(p[3]) << 16)});
}
static inline void store_bf16(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; i++) p[i] = f32_to_bf16(x[i]);
}

}  // namespace QF_ISA
}  // namespace qf
