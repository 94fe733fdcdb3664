// INT8 building blocks on AVX-512 VNNI and AMX. vpdpbusd multiplies unsigned by signed bytes, so without AMX q is
// stored with 128 added and each panel ends with what that adds to a dot product, -128 * sum(k), to start from.
#pragma once

#include "vec.h"

namespace qf {
namespace QF_ISA {

using Integer = int8_t;    // one quantized value; four bytes hold kPack of them
using ScoreVec = __m512i;  // kLanes dot products
constexpr int kPack = 4;
#if defined(__AMX_INT8__)
constexpr int kDepthStep = 64;
constexpr int kRowBlock = 32;
constexpr int kStepKeys = 256;  // keys of one step of online softmax
constexpr bool kBiased = false;
#else
constexpr int kDepthStep = 4;
constexpr int kRowTile = 6;    // rows of a register tile
constexpr int kScoreVecs = 4;  // vectors of keys in a register tile of scores
constexpr int kValueVecs = 4;  // vectors of channels in a register tile of out
constexpr int kRowBlock = 24;
constexpr int kStepKeys = 128;  // keys of one step of online softmax
constexpr bool kBiased = true;
#endif

static inline void store_integers(Integer* destination, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(destination), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
static inline ScoreVec no_score() { return _mm512_setzero_si512(); }
static inline ScoreVec load_keys(const uint32_t* p) { return _mm512_loadu_si512(p); }
static inline ScoreVec broadcast_query(const Integer* q) {
  int32_t quad;
  memcpy(&quad, q, 4);
  return _mm512_set1_epi32(quad);
}
static inline ScoreVec dot(ScoreVec sum, ScoreVec q, ScoreVec k) { return _mm512_dpbusd_epi32(sum, q, k); }
static inline void store_scores(void* p, ScoreVec x) { _mm512_storeu_si512(p, x); }
static inline Vec load_scores(const void* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }

static inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
// 2^n times p, n taken from the last bits of `shifted` = n + 1.5 * 2^23.
static inline Vec add_exponent(Vec p, Vec shifted) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

}  // namespace QF_ISA
}  // namespace qf
