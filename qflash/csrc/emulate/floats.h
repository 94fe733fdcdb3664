// Small floats to float32, bit by bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulate {

inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
// Exponent biases are 112 apart, and subnormals become normal; g++ would call a function for each _Float16.
inline float from_f16(uint16_t bits) {
  const uint32_t size = uint32_t(bits & 0x7fff) << 13, sign = uint32_t(bits & 0x8000) << 16;
  const float finite = from_bits(size) * 0x1p112f;
  return std::copysign((bits & 0x7c00) == 0x7c00 ? from_bits(size | 0x7f800000) : finite, from_bits(sign));
}
inline float from_bf16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }
// Exponent biases are 120 apart; there is no infinity, and one NaN of each sign.
inline float from_e4m3(uint16_t bits) {
  const float finite = from_bits(uint32_t(bits & 0x7f) << 20) * 0x1p120f;
  return std::copysign((bits & 0x7f) == 0x7f ? NAN : finite, from_bits(uint32_t(bits & 0x80) << 24));
}

// c + 0 x in both halves of a word. exponent: the exponent bits of the 16-bit format.
inline uint32_t add_zero_times(uint32_t x, uint32_t c, uint16_t exponent) {
  for (int half = 0; half < 32; half += 16)
    if ((x >> half & exponent) == exponent) c |= uint32_t(0x7fff) << half;
  return c;
}

}  // namespace emulate
