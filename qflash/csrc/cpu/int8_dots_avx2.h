// INT8 building blocks on AVX2: integers are stored as int16 and vpmaddwd adds two products exactly. vpmaddubsw would
// halve the traffic but needs a sign move and a widening add per step, four operations for the same 32 products.
#pragma once

#include "vec.h"

namespace qf {
namespace QF_ISA {

using Integer = int16_t;   // one quantized value; four bytes hold kPack of them
using ScoreVec = __m256i;  // kLanes dot products
constexpr int kPack = 2;
constexpr int kDepthStep = 2;
constexpr int kRowTile = 6;    // rows of a register tile
constexpr int kScoreVecs = 2;  // vectors of keys in a register tile of scores
constexpr int kValueVecs = 2;  // vectors of channels in a register tile of out
constexpr int kRowBlock = 24;
constexpr int kStepKeys = 128;  // keys of one step of online softmax
constexpr bool kBiased = false;

static inline void store_integers(Integer* destination, Vec x) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(destination), narrow);
}
static inline ScoreVec no_score() { return _mm256_setzero_si256(); }
static inline ScoreVec load_keys(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline ScoreVec broadcast_query(const Integer* q) {
  int32_t pair;
  memcpy(&pair, q, 4);
  return _mm256_set1_epi32(pair);
}
static inline ScoreVec dot(ScoreVec sum, ScoreVec q, ScoreVec k) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(q, k));
}
static inline void store_scores(void* p, ScoreVec x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
static inline Vec load_scores(const void* p) {
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

static inline bool any_greater(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
// 2^n times p, n taken from the last bits of `shifted` = n + 1.5 * 2^23.
static inline Vec add_exponent(Vec p, Vec shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
}

}  // namespace QF_ISA
}  // namespace qf
