// From float32 to int8, as docs/kernels/quantize.md defines it: shared by every source that rounds. Compiled without
// fused multiply-adds.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace qf {

constexpr uint32_t kInfinityBits = 0x7f800000u;  // magnitudes, as integers, from here on are nonfinite
constexpr float kNoAmplitude = 0x1p-100f;        // below it there is no scale
// 1.5 * 2^23: adding it to a float32 of magnitude 0 .. 2^22 and subtracting it rounds to nearest even.
constexpr float kIntegers = 12582912.0f;

struct Scale {
  float scale, inverse, zero_point;
};

// Of numbers up to `amplitude` in magnitude, whose integers run from -127 to 127.
static inline Scale scale_of_amplitude(float amplitude) {
  if (amplitude < kNoAmplitude) return {0.0f, 0.0f, 0.0f};
  return {amplitude / 127.0f, 127.0f / amplitude, 0.0f};
}

// |x| as an integer, of the largest of x[0, n): infinity is above every number, NaN above infinity.
static inline uint32_t largest_magnitude(const float* x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    const int32_t magnitude = bits & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return uint32_t(largest);
}

static inline float number_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

}  // namespace qf
