// Packs columns of b and rows of a as the products of int8_tiles_*.h read them.
//
// A panel holds kInt8Panel columns; group g of it is kPack values along k of each column, four bytes per column. Where
// a is stored with 128 added (kBiased), a panel ends with what that adds to each sum, negated.
#pragma once

#include "int8.h"
#include "int8_dots.h"
#include "qflash_ops.h"

namespace qf {
namespace QF_ISA {

// Values of k in one chunk. |sum| <= 128 * 128 * 1024 = 2^24 is exact in float32.
constexpr int kDepth = sizeof(Integer) == 4 ? 1024 : 2048;
static_assert(kDepth % kDepthStep == 0 && kDepth % (kLanes * kPack) == 0, "a chunk is whole steps and whole vectors");

static inline int groups_of(int depth) { return int(round_up(depth, kDepthStep)) / kPack; }
static inline int64_t panel_bytes_of(int depth) {
  return int64_t(groups_of(depth) + (kBiased ? 1 : 0)) * kInt8Panel * 4;
}

// Packs kLanes columns of a panel from memory that runs along k: words of kPack values, transposed kLanes at a time.
static inline void pack_along_k(const int8_t* b, int64_t stride, int columns, int depth, char* half) {
  const int padded = groups_of(depth) * kPack;
  for (int k = 0; k < padded; k += kLanes * kPack) {
    Vec words[kLanes];
    for (int c = 0; c < kLanes; c++) {
      Integer values[kLanes * kPack] = {};
      if (c < columns) {
        const int8_t* from = b + c * stride + k;
        if (k + kLanes * kPack <= depth) {
          for (int i = 0; i < kLanes * kPack; i++) values[i] = Integer(from[i]);
        } else {
          for (int i = 0; k + i < depth; i++) values[i] = Integer(from[i]);
        }
      }
      memcpy(&words[c], values, sizeof words[c]);
    }
    transpose(words);
    const int groups = (padded - k) / kPack < kLanes ? (padded - k) / kPack : kLanes;
    for (int g = 0; g < groups; g++) memcpy(half + int64_t(k / kPack + g) * kInt8Panel * 4, &words[g], sizeof words[g]);
  }
}

// Packs a panel from memory of any strides; fast where neighbouring columns are neighbours.
static inline void pack_along_n(const int8_t* b, int64_t stride_k, int64_t stride_n, int columns, int depth,
                                char* panel) {
  Integer values[kPack][kInt8Panel];
  Integer mixed[kInt8Panel][kPack];
  for (int g = 0; g < groups_of(depth); g++) {
    for (int e = 0; e < kPack; e++) {
      const int k = g * kPack + e;
      const int8_t* from = b + k * stride_k;
      if (k < depth && columns == kInt8Panel && stride_n == 1) {
        for (int c = 0; c < kInt8Panel; c++) values[e][c] = Integer(from[c]);
      } else {
        for (int c = 0; c < kInt8Panel; c++)
          values[e][c] = k < depth && c < columns ? Integer(from[c * stride_n]) : Integer(0);
      }
    }
    for (int c = 0; c < kInt8Panel; c++)
      for (int e = 0; e < kPack; e++) mixed[c][e] = values[e][c];
    memcpy(panel + int64_t(g) * sizeof mixed, mixed, sizeof mixed);
  }
}

// Writes -128 times the sum of each column, in the group behind the last. Sums are products with 1.
static inline void pack_correction(char* panel, int depth) {
  Integer ones[kPack];
  for (int i = 0; i < kPack; i++) ones[i] = 1;
  uint32_t* const groups = reinterpret_cast<uint32_t*>(panel);
  int32_t sums[kInt8Panel];
  for (int c = 0; c < kInt8Panel; c += kLanes) {
    ScoreVec sum = no_score();
    for (int g = 0; g < groups_of(depth); g++)
      sum = dot(sum, broadcast_query(ones), load_keys(groups + g * kInt8Panel + c));
    store_scores(sums + c, sum);
  }
  for (int c = 0; c < kInt8Panel; c++) sums[c] *= -128;
  memcpy(groups + groups_of(depth) * kInt8Panel, sums, sizeof sums);
}

// A weight [k, n] in memory; one of the strides is 1.
struct Int8Weight {
  const int8_t* data;
  int64_t stride_k, stride_n;
};

// Columns [first, first + columns), columns <= kInt8Panel, of b's rows [k0, k0 + depth).
static inline void pack_panel(const Int8Weight& b, int64_t first, int columns, int64_t k0, int depth, char* panel) {
  const int8_t* from = b.data + k0 * b.stride_k + first * b.stride_n;
  if (b.stride_k == 1) {
    for (int c = 0; c < kInt8Panel; c += kLanes)
      pack_along_k(from + c * b.stride_n, b.stride_n, columns - c, depth, panel + c * 4);
  } else {
    pack_along_n(from, b.stride_k, b.stride_n, columns, depth, panel);
  }
  if constexpr (kBiased) pack_correction(panel, depth);
}

// Distance between packed rows of a: whole cache lines, and not a power of two.
constexpr int kRowStride = kDepth + 64 / int(sizeof(Integer));

// Rows [row, row + rows) of a, values [k0, k0 + depth), zeros up to kRowBlock rows and whole steps.
static inline void pack_rows(const QfLinearParams& p, int64_t row, int rows, int64_t k0, int depth, Integer* packed) {
  const int padded = groups_of(depth) * kPack;
  for (int r = 0; r < kRowBlock; r++, packed += kRowStride) {
    if (r >= rows) {
      memset(packed, 0, size_t(padded) * sizeof(Integer));
      continue;
    }
    const int8_t* from = static_cast<const int8_t*>(p.x) + (row + r) * p.x_stride_m + k0;
    for (int k = 0; k < depth; k++) packed[k] = kBiased ? Integer(int8_t(from[k] ^ -128)) : Integer(from[k]);
    memset(packed + depth, 0, size_t(padded - depth) * sizeof(Integer));
  }
}

}  // namespace QF_ISA
}  // namespace qf
