// Vec on AVX-512 F, BW, VL, DQ. See vec.h for the meanings.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace qf {
namespace QF_ISA {

using Vec = __m512;
constexpr int kLanes = 16;

static inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }

static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static inline void store_part(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
static inline float max(Vec x) { return _mm512_reduce_max_ps(x); }

static inline Vec round_nearest(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p * 2^n for integral n.
static inline Vec scale_by_power(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }
static inline Vec scale_by_small_power(Vec p, Vec n) { return _mm512_scalef_ps(p, n); }
// Lanes of y where not a < b (so also where either is NaN), zero elsewhere.
static inline Vec zero_where_less(Vec a, Vec b, Vec y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), y);
}
static inline Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
}
// Lanes [0, n) of x, the others of `rest`.
static inline Vec first_or(Vec x, int n, Vec rest) { return _mm512_mask_mov_ps(rest, first_lanes(n), x); }
static inline Vec copy_sign(Vec magnitude, Vec sign) {
  const Vec bit = broadcast(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
}

// a0 b0 a1 b1 ... of the lower, and of the upper halves.
static inline Vec interleave_low(Vec a, Vec b) {
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(a, order, b);
}
static inline Vec interleave_high(Vec a, Vec b) {
  const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(a, order, b);
}

// rows[i][j] <-> rows[j][i]: first squares of four within 128 bits, whose instructions are the cheapest, then the
// squares.
static inline __attribute__((always_inline)) void transpose(Vec* rows) {
  Vec inside[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
    inside[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
    inside[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
    inside[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
    inside[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vec even01 = _mm512_shuffle_f32x4(inside[i], inside[i + 4], 0x88);
    const Vec odd01 = _mm512_shuffle_f32x4(inside[i], inside[i + 4], 0xdd);
    const Vec even23 = _mm512_shuffle_f32x4(inside[i + 8], inside[i + 12], 0x88);
    const Vec odd23 = _mm512_shuffle_f32x4(inside[i + 8], inside[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(even01, even23, 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
  }
}

static inline Vec load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline Vec load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline void store_f16(uint16_t* p, Vec x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline void store_bf16(uint16_t* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)), nan = _mm512_set1_epi32(0x7fc00000);
  const __m512i kept = _mm512_mask_add_epi32(nan, _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), bits, up);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

}  // namespace QF_ISA
}  // namespace qf
