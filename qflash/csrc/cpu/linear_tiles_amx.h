// The product of packed blocks of bfloat16 in AMX tiles: C = A B, or C += A B, as in linear_tile.h.
//
// A word is two bfloat16 of consecutive k, and rows of words are what tdpbf16ps reads: 16 rows of 16 words of A are a
// tile, and so are 16 words of 16 columns of B. Two by two tiles of C (tmm0..3) share two of A (tmm4, tmm5) and two of
// B (tmm6, tmm7), so that four products share four loads. An element of C is a chain over tiles of k, whatever rows and
// columns are computed with it.
#pragma once

#include "amx.h"
#include "linear_ahead.h"
#include "multiply.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {

constexpr int kTileWords = kTileRowBytes / 4;  // of k
constexpr int kRowStep = 2 * kTileRows;

// Steps of Wanted in the product of a panel.
static inline int64_t product_steps(int rows, int columns, int words) {
  return ceil_div(rows, kRowStep) * ceil_div(columns, 2 * kLanes) * words;
}

// One or two tiles of rows, and one or two of columns.
template <bool kTwoRows, bool kTwoColumns>
static inline void tiles_product(const float* a, int64_t pitch, const float* b, float* c, int64_t ldc, int words,
                                 bool first, Wanted& ahead) {
  const int64_t a_stride = pitch * 4, b_stride = kPanel * 4, c_stride = ldc * 4;
  float* const c_below = c + kTileRows * ldc;
  if (first) {
    _tile_zero(0);
    if (kTwoColumns) _tile_zero(1);
    if (kTwoRows) _tile_zero(2);
    if (kTwoRows && kTwoColumns) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_stride);
    if (kTwoColumns) _tile_loadd(1, c + kLanes, c_stride);
    if (kTwoRows) _tile_loadd(2, c_below, c_stride);
    if (kTwoRows && kTwoColumns) _tile_loadd(3, c_below + kLanes, c_stride);
  }
  for (int k = 0; k < words; k += kTileWords, a += kTileWords, b += kTileWords * kPanel) {
    for (int i = 0; i < kTileWords; i++) ahead.step();
    _tile_loadd(4, a, a_stride);
    if (kTwoRows) _tile_loadd(5, a + kTileRows * pitch, a_stride);
    _tile_loadd(6, b, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoRows) _tile_dpbf16ps(2, 5, 6);
    if (kTwoColumns) {
      _tile_loadd(7, b + kLanes, b_stride);
      _tile_dpbf16ps(1, 4, 7);
      if (kTwoRows) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  if (kTwoColumns) _tile_stored(1, c + kLanes, c_stride);
  if (kTwoRows) _tile_stored(2, c_below, c_stride);
  if (kTwoRows && kTwoColumns) _tile_stored(3, c_below + kLanes, c_stride);
}

// All columns of one or two tiles of rows.
template <bool kTwoRows>
static inline void tile_rows_product(int vectors, const float* a, int64_t pitch, const float* b, float* c, int64_t ldc,
                                     int words, bool first, Wanted& ahead) {
  for (int v = 0; v < vectors; v += 2, b += 2 * kLanes, c += 2 * kLanes) {
    for (int i = 0; i < 3; i++) ahead.tile();  // per 32 rows and columns, as many as for six rows and all columns
    if (vectors - v > 1)
      tiles_product<kTwoRows, true>(a, pitch, b, c, ldc, words, first, ahead);
    else
      tiles_product<kTwoRows, false>(a, pitch, b, c, ldc, words, first, ahead);
  }
}

// C[rows][vectors] (+)= A B for one panel, vectors in 1..kMaxVectors. A's rows and B are whole tiles of words long: A
// has zeros after the last word, and B gets them here.
template <class Words>
static inline void product(int vectors, int rows, const float* a, int64_t pitch, float* b, float* c, int64_t ldc,
                           int words, bool first, Wanted& ahead) {
  for (int k = words; k % kTileWords != 0; k++)
    for (int v = 0; v < vectors; v++) store(b + k * kPanel + v * kLanes, zero());
  const int whole = rows / kTileRows * kTileRows;
  if (whole > 0) {
    const TileSession session;
    int r = 0;
    for (; whole - r >= kRowStep; r += kRowStep)
      tile_rows_product<true>(vectors, a + r * pitch, pitch, b, c + r * ldc, ldc, words, first, ahead);
    if (r < whole) tile_rows_product<false>(vectors, a + r * pitch, pitch, b, c + r * ldc, ldc, words, first, ahead);
  }
  if (whole == rows) return;
  const TileSession session(rows - whole);
  tile_rows_product<false>(vectors, a + whole * pitch, pitch, b, c + whole * ldc, ldc, words, first, ahead);
}

}  // namespace QF_ISA
}  // namespace qf
