// Vec on AVX2, FMA and F16C. See vec.h for the meanings.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace qf {
namespace QF_ISA {

using Vec = __m256;
constexpr int kLanes = 8;

static inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline Vec load_part(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
static inline void store_part(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }

static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline float sum(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline float max(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

static inline Vec round_nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// p * 2^n for integral n in [-126, 127] and p in [1/2, 2), by adding to the exponent. NaN stays NaN.
static inline Vec scale_by_small_power(Vec p, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}
// p * 2^n for integral n in [-252, 254]: half the power at a time, so that the product may overflow properly.
static inline Vec scale_by_power(Vec p, Vec n) {
  const __m256i power = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(power, 1), bias = _mm256_set1_epi32(127);
  const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(power, half), bias), 23);
  return p * _mm256_castsi256_ps(a) * _mm256_castsi256_ps(b);
}
// Lanes of y where not a < b (so also where either is NaN), zero elsewhere.
static inline Vec zero_where_less(Vec a, Vec b, Vec y) { return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), y); }
static inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// Lanes [0, n) of x, the others of `rest`.
static inline Vec first_or(Vec x, int n, Vec rest) {
  return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(first_lanes(n)));
}
static inline Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec bit = broadcast(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}

// a0 b0 a1 b1 ... of the lower, and of the upper halves.
static inline Vec interleave_low(Vec a, Vec b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
static inline Vec interleave_high(Vec a, Vec b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}

static inline Vec load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline Vec load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline void store_f16(uint16_t* p, Vec x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Vec load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline void store_bf16(uint16_t* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const Vec kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)),
                                    _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}

}  // namespace QF_ISA
}  // namespace qf
