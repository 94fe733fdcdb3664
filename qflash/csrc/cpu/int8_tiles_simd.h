// The two matrix products of a block in vector registers: exact integer scores, and float32 weights times values.
//
// Packed keys: a panel holds kInt8Panel keys; group g of it is kPack channels of each key, four bytes per key, so one
// load feeds kLanes keys and one broadcast of four bytes of q is multiplied with all of them. Values are float32
// [key, width].
#pragma once

#include "int8.h"
#include "int8_dots.h"

namespace qf {
namespace QF_ISA {

struct TileSession {};  // AMX needs its tiles set up around the products; vectors need nothing

static inline int value_width(int head_dim) { return int(round_up(head_dim, kLanes)); }
static inline int64_t value_bytes(int head_dim) { return int64_t(value_width(head_dim)) * 4; }

static inline void pack_values(char* values, const float* rows, int head_dim, int keys) {
  memcpy(values, rows, size_t(value_bytes(head_dim)) * keys);
}

static inline void store_weights(char* row, int key, Vec first, Vec second) {
  float* weights = reinterpret_cast<float*>(row) + key;
  store(weights, first);
  store(weights + kLanes, second);
}

template <int kRows, int kVecs>
static inline void score_tile(const Integer* q, int q_stride, const char* panels, int64_t panel_stride, int groups,
                              char* scores) {
  const uint32_t* keys[kVecs];
  ScoreVec sum[kRows][kVecs];
  for (int c = 0; c < kVecs; c++) {
    const int key = c * kLanes;
    keys[c] = reinterpret_cast<const uint32_t*>(panels + key / kInt8Panel * panel_stride) + key % kInt8Panel;
    for (int r = 0; r < kRows; r++) sum[r][c] = kBiased ? load_keys(keys[c] + groups * kInt8Panel) : no_score();
  }
#pragma GCC unroll 4  // GCC copies every sum at the end of an iteration; fewer iterations, fewer copies
  for (int g = 0; g < groups; g++) {
    ScoreVec k[kVecs];
    for (int c = 0; c < kVecs; c++) k[c] = load_keys(keys[c] + g * kInt8Panel);
    for (int r = 0; r < kRows; r++) {
      const ScoreVec x = broadcast_query(q + r * q_stride + g * kPack);
      for (int c = 0; c < kVecs; c++) sum[r][c] = dot(sum[r][c], x, k[c]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kVecs; c++) store_scores(scores + r * kScoreStride + c * kLanes * 4, sum[r][c]);
}

template <int kRows>
static void score_rows(const Integer* q, int q_stride, int rows, const char* panels, int64_t panel_stride, int groups,
                       int keys, char* scores) {
  constexpr int kStep = kScoreVecs * kLanes;
  for (; rows >= kRows; rows -= kRows, q += kRows * q_stride, scores += kRows * kScoreStride) {
    int key = 0;
    for (; key + kStep <= keys; key += kStep)
      score_tile<kRows, kScoreVecs>(q, q_stride, panels + key / kInt8Panel * panel_stride, panel_stride, groups,
                                    scores + key * 4);
    if (key < keys)
      score_tile<kRows, kScoreVecs / 2>(q, q_stride, panels + key / kInt8Panel * panel_stride, panel_stride, groups,
                                        scores + key * 4);
  }
  if constexpr (kRows > 1)
    if (rows > 0) score_rows<kRows - 1>(q, q_stride, rows, panels, panel_stride, groups, keys, scores);
}

// scores[r][j] = q[r] . k[j] for `keys` keys, a multiple of kInt8KeyStep; rows of scores are kScoreStride apart.
static inline void score_block(const TileSession&, const Integer* q, int q_stride, int rows, const char* panels,
                               int64_t panel_stride, int groups, int keys, char* scores) {
  static_assert(kInt8KeyStep % (kScoreVecs * kLanes / 2) == 0, "half a tile of scores covers the last keys");
  score_rows<kRowTile>(q, q_stride, rows, panels, panel_stride, groups, keys, scores);
}

template <int kRows, int kVecs>
static inline void value_tile(const char* weights, const float* values, int width, int keys, float* out) {
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kVecs; c++) sum[r][c] = load(out + r * width + c * kLanes);
  for (int j = 0; j < keys; j++) {
    Vec v[kVecs];
    for (int c = 0; c < kVecs; c++) v[c] = load(values + int64_t(j) * width + c * kLanes);
    for (int r = 0; r < kRows; r++) {
      const Vec w = broadcast(reinterpret_cast<const float*>(weights + r * kScoreStride)[j]);
      for (int c = 0; c < kVecs; c++) sum[r][c] = fma(w, v[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kVecs; c++) store(out + r * width + c * kLanes, sum[r][c]);
}

template <int kRows, int kVecs>
static inline void value_columns(const char* weights, const float* values, int width, int column, int keys,
                                 float* out) {
  for (; column + kVecs * kLanes <= width; column += kVecs * kLanes)
    value_tile<kRows, kVecs>(weights, values + column, width, keys, out + column);
  if constexpr (kVecs > 1)
    if (column < width) value_columns<kRows, kVecs - 1>(weights, values, width, column, keys, out);
}

template <int kRows>
static void value_rows(const char* weights, int rows, const float* values, int width, int keys, float* out) {
  for (; rows >= kRows; rows -= kRows, weights += kRows * kScoreStride, out += kRows * width)
    value_columns<kRows, kValueVecs>(weights, values, width, 0, keys, out);
  if constexpr (kRows > 1)
    if (rows > 0) value_rows<kRows - 1>(weights, rows, values, width, keys, out);
}

// out[r] += weights[r] . values for `keys` keys; rows of weights are kScoreStride apart.
static inline void value_block(const TileSession&, const char* weights, int rows, const char* values, int head_dim,
                               int keys, float* out) {
  value_rows<kRowTile>(weights, rows, reinterpret_cast<const float*>(values), value_width(head_dim), keys, out);
}

}  // namespace QF_ISA
}  // namespace qf
