// The arithmetic of one backward tile on packed float32 operands. Included by backward_isa.cc, once per instruction
// set.
//
// All five products have the same shape: a register block of rows x vectors, each depth step multiplying one vector
// of B by one broadcast number of A per row. B is laid out so that its vectors are contiguous (k and v transposed
// for the scores, row-major for the rest), so no product needs a shuffle.
#pragma once

#include "backward.h"
#include "vec.h"

namespace qf {
namespace QF_ISA {

// Register blocks: as many accumulators as leave room for one row of B. Scores tile 96 keys, updates tile the pitch.
constexpr int kScoreRows = kLanes == 16 ? 8 : 6, kScoreVecs = kLanes == 16 ? 3 : 2;
constexpr int kUpdateRows = 6, kUpdateVecs = kLanes == 16 ? 4 : 2;
static_assert(kBwdBlock % kScoreRows == 0 && kBwdBlock % kUpdateRows == 0 && kBwdBlock % (kScoreVecs * kLanes) == 0,
              "a block is a whole number of register blocks");
static_assert(kBwdRowMultiple % kScoreRows == 0 && kBwdRowMultiple % kUpdateRows == 0,
              "padded rows are a whole number of register blocks");

struct Range {
  int begin, end;
};

static inline Range clip(int begin, int end, int limit) {
  const Range r{begin < 0 ? 0 : begin, end > limit ? limit : end};
  return r.begin < r.end ? r : Range{0, 0};
}

// Keys that any of the queries [first, end) sees; queries that see any of the keys [first, end).
static inline Range keys_seen(const TileMask& mask, int first, int end) {
  return clip(first + mask.low, end - 1 + mask.high, mask.columns);
}
static inline Range queries_seeing(const TileMask& mask, int first, int end) {
  return clip(first - mask.high + 1, end - mask.low, mask.rows);
}

static inline bool all_seen(const TileMask& mask) { return mask.rows - 1 + mask.low <= 0 && mask.high >= mask.columns; }

// x where the key of the lane, counted from `key`, lies in `seen`; zero elsewhere.
static inline Vec keep_seen(Vec x, int key, Range seen) {
  alignas(64) static const float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec lane = load(kCount);
  return zero_where_less(lane, broadcast(float(seen.begin - key)),
                         zero_where_less(broadcast(float(seen.end - 1 - key)), lane, x));
}

// acc = a b for kScoreRows rows of a [rows][pitch] and kScoreVecs vectors of b [depth][kBwdBlock].
static inline void score_product(const float* a, int pitch, const float* b, int depth,
                                 Vec (&acc)[kScoreRows][kScoreVecs]) {
  for (int r = 0; r < kScoreRows; r++)
    for (int n = 0; n < kScoreVecs; n++) acc[r][n] = zero();
  for (int d = 0; d < depth; d++, b += kBwdBlock) {
    Vec row[kScoreVecs];
    for (int n = 0; n < kScoreVecs; n++) row[n] = load(b + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kScoreRows; r++) {
      const Vec x = broadcast(a[r * pitch + d]);
      for (int n = 0; n < kScoreVecs; n++) acc[r][n] = fma(x, row[n], acc[r][n]);
    }
  }
}

// What turns a raw score into a weight: weight = 2^(score * factor - lse * log2(e)), or with a cap
// 2^(tanh(score * inverse_cap) * factor - lse * log2(e)).
struct WeightMap {
  float factor, inverse_cap;
};

// Whether no query of the register block at (row, key) sees any of its keys.
static inline bool out_of_sight(const TileMask& mask, int row, int key) {
  const Range seen = keys_seen(mask, row, row + kScoreRows);
  return seen.begin >= key + kScoreVecs * kLanes || seen.end <= key;
}

static inline void clear_block(float* x) {
  for (int r = 0; r < kScoreRows; r++)
    for (int n = 0; n < kScoreVecs; n++) store(x + r * kBwdBlock + n * kLanes, zero());
}

// P of one register block at (row, key). The cap's slope is held in dS's place until dP is known.
template <bool kMasked, bool kCapped>
static inline void weight_block(const WeightMap& map, int head_dim, int pitch, const QueryTile& tile,
                                const TileMask& mask, const KeyBlock& block, int row, int key) {
  float* p = block.p + row * kBwdBlock + key;
  float* ds = block.ds + row * kBwdBlock + key;
  if (kMasked && out_of_sight(mask, row, key)) return clear_block(p);
  Vec acc[kScoreRows][kScoreVecs];
  score_product(tile.q + row * pitch, pitch, block.k_t + key, head_dim, acc);
  for (int r = 0; r < kScoreRows; r++) {
    const Vec minus_lse = broadcast(tile.minus_lse[row + r]);
    const Range seen = kMasked ? keys_seen(mask, row + r, row + r + 1) : Range{0, 0};
    for (int n = 0; n < kScoreVecs; n++) {
      Vec score = acc[r][n];
      if (kCapped) {
        score = score * broadcast(map.inverse_cap);
        store(ds + r * kBwdBlock + n * kLanes, tanh_slope(score));
        score = tanh(score);
      }
      Vec weight = exp2_nonpositive(fma(score, broadcast(map.factor), minus_lse));
      if (kMasked) weight = keep_seen(weight, key + n * kLanes, seen);
      store(p + r * kBwdBlock + n * kLanes, weight);
    }
  }
}

// dS of one register block at (row, key), whose P is known.
template <bool kMasked, bool kCapped>
static inline void gradient_block(int head_dim, int pitch, const QueryTile& tile, const TileMask& mask,
                                  const KeyBlock& block, int row, int key) {
  const float* p = block.p + row * kBwdBlock + key;
  float* ds = block.ds + row * kBwdBlock + key;
  if (kMasked && out_of_sight(mask, row, key)) return clear_block(ds);
  Vec acc[kScoreRows][kScoreVecs];
  score_product(tile.dout + row * pitch, pitch, block.v_t + key, head_dim, acc);
  for (int r = 0; r < kScoreRows; r++) {
    const Vec delta = broadcast(tile.delta[row + r]);
    const Range seen = kMasked ? keys_seen(mask, row + r, row + r + 1) : Range{0, 0};
    for (int n = 0; n < kScoreVecs; n++) {
      Vec gradient = load(p + r * kBwdBlock + n * kLanes) * (acc[r][n] - delta);
      if (kCapped) gradient = gradient * load(ds + r * kBwdBlock + n * kLanes);
      if (kMasked) gradient = keep_seen(gradient, key + n * kLanes, seen);
      store(ds + r * kBwdBlock + n * kLanes, gradient);
    }
  }
}

// One strip of k_t, then the same strip of v_t, stays in the first-level cache while the rows stream by.
template <bool kMasked, bool kCapped>
static void score_tile(const WeightMap& map, int head_dim, int pitch, const QueryTile& tile, const TileMask& mask,
                       const KeyBlock& block) {
  for (int key = 0; key < mask.columns; key += kScoreVecs * kLanes) {
    for (int row = 0; row < mask.rows; row += kScoreRows)
      weight_block<kMasked, kCapped>(map, head_dim, pitch, tile, mask, block, row, key);
    for (int row = 0; row < mask.rows; row += kScoreRows)
      gradient_block<kMasked, kCapped>(head_dim, pitch, tile, mask, block, row, key);
  }
}

// c += sum over `depth` of a b, for kRows rows and kVecs vectors of c [][pitch] and b [][pitch]. The element of a for
// row r at depth step s is a[s * kStep + r * kStride].
template <int kRows, int kVecs, int kStep, int kStride>
static inline void update_block(const float* a, const float* b, float* c, int pitch, Range depth) {
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < kVecs; n++) acc[r][n] = load(c + r * pitch + n * kLanes);
  for (int s = depth.begin; s < depth.end; s++) {
    Vec row[kVecs];
    for (int n = 0; n < kVecs; n++) row[n] = load(b + s * pitch + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Vec x = broadcast(a[s * kStep + r * kStride]);
      for (int n = 0; n < kVecs; n++) acc[r][n] = fma(x, row[n], acc[r][n]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int n = 0; n < kVecs; n++) store(c + r * pitch + n * kLanes, acc[r][n]);
}

// All rows of c for the kVecs vectors at column `column`, each register block over the depth it can see.
template <int kRows, int kVecs, int kStep, int kStride>
static void update_columns(const float* a, const float* b, float* c, int pitch, int column, int rows,
                           const TileMask& mask, Range (*seen)(const TileMask&, int, int)) {
  for (int row = 0; row < rows; row += kRows) {
    const int end = row + kRows < rows ? row + kRows : rows;
    const Range depth = seen(mask, row, end);
    if (depth.begin < depth.end)
      update_block<kRows, kVecs, kStep, kStride>(a + row * kStride, b + column, c + row * pitch + column, pitch, depth);
  }
}

template <int kRows, int kStep, int kStride>
static void update_rows(const float* a, const float* b, float* c, int pitch, int rows, const TileMask& mask,
                        Range (*seen)(const TileMask&, int, int)) {
  int column = 0;
  for (; column + kUpdateVecs * kLanes <= pitch; column += kUpdateVecs * kLanes)
    update_columns<kRows, kUpdateVecs, kStep, kStride>(a, b, c, pitch, column, rows, mask, seen);
  const int left = (pitch - column) / kLanes;
  if (kUpdateVecs > 3 && left == 3) update_columns<kRows, 3, kStep, kStride>(a, b, c, pitch, column, rows, mask, seen);
  if (kUpdateVecs > 2 && left == 2) update_columns<kRows, 2, kStep, kStride>(a, b, c, pitch, column, rows, mask, seen);
  if (left == 1) update_columns<kRows, 1, kStep, kStride>(a, b, c, pitch, column, rows, mask, seen);
}

// c += a b, or a^T b with kStep and kStride exchanged. A register block of a partly masked tile also multiplies zeros
// by operands that are masked; where those are nonfinite, rows are processed one at a time over exactly what they see.
template <int kStep, int kStride>
static void update(const float* a, const float* b, float* c, int pitch, int rows, const TileMask& mask,
                   Range (*seen)(const TileMask&, int, int), bool finite) {
  if (finite || all_seen(mask))
    update_rows<kUpdateRows, kStep, kStride>(a, b, c, pitch, rows, mask, seen);
  else
    update_rows<1, kStep, kStride>(a, b, c, pitch, rows, mask, seen);
}

}  // namespace QF_ISA
}  // namespace qf
