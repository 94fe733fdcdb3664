// INT8 building blocks without any instruction set: integers are stored as floats; products and sums are exact here.
// |dot| <= 127 * 127 * 256 < 2^24.
#pragma once

#include <math.h>

#include "vec.h"

namespace qf {
namespace QF_ISA {

using Integer = float;  // one quantized value; four bytes hold kPack of them
using ScoreVec = Vec;   // kLanes dot products
constexpr int kPack = 1;
constexpr int kDepthStep = 1;
constexpr int kRowTile = 2;    // rows of a register tile
constexpr int kScoreVecs = 4;  // vectors of keys in a register tile of scores
constexpr int kValueVecs = 2;  // vectors of channels in a register tile of out
constexpr int kRowBlock = 24;
constexpr int kStepKeys = 128;  // keys of one step of online softmax
constexpr bool kBiased = false;

static inline void store_integers(Integer* destination, Vec x) { store(destination, round_nearest(x)); }
static inline ScoreVec no_score() { return zero(); }
static inline ScoreVec load_keys(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
static inline ScoreVec broadcast_query(const Integer* q) { return broadcast(*q); }
static inline ScoreVec dot(ScoreVec sum, ScoreVec q, ScoreVec k) { return sum + q * k; }
static inline void store_scores(void* p, ScoreVec x) { memcpy(p, &x, sizeof x); }
static inline Vec load_scores(const void* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

static inline bool any_greater(Vec a, Vec b) {
  bool found = false;
  for (int i = 0; i < kLanes; i++) found |= a[i] > b[i];
  return found;
}
// 2^n times p, n taken from the last bits of `shifted` = n + 1.5 * 2^23.
static inline Vec add_exponent(Vec p, Vec shifted) { return from_bits(bits_of(p) + (bits_of(shifted) << 23)); }

}  // namespace QF_ISA
}  // namespace qf
