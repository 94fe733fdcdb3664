// Blocks of x and w as words (linear_words.h) in the order the product reads them.
#pragma once

#include "linear_ahead.h"
#include "linear_words.h"
#include "multiply.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {

static inline int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }

// kLanes vectors, transposed, to `count` rows of words.
static inline void store_transposed(Vec* block, float* to, int64_t pitch, int count) {
  transpose(block);
  if (count >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) store(to + i * pitch, block[i]);
  } else {
    for (int i = 0; i < count; i++) store(to + i * pitch, block[i]);
  }
}

// Rows of x to rows of words, `pitch` apart, whole vectors of them. x[r][c] is x[r * row_stride + c * k_stride].
template <class Words>
static void pack_x(const typename Words::Number* x, int64_t row_stride, int64_t k_stride, int rows, int depth,
                   float* packed, int64_t pitch) {
  constexpr int kNumbers = kLanes * Words::kPack;  // of a vector of words
  if (k_stride == 1) {
    for (int r = 0; r < rows; r++, x += row_stride, packed += pitch)
      for (int k = 0; k < depth; k += kNumbers) store(packed + k / Words::kPack, Words::along(x + k, depth - k));
    return;
  }
  for (int r = 0; r < rows; r += kLanes)
    for (int k = 0; k < depth; k += kNumbers) {
      Vec block[kLanes];
      for (int i = 0; i < kLanes; i++) {
        const int at = k + i * Words::kPack;
        block[i] = at < depth ? Words::across(x + r + at * k_stride, k_stride, depth - at, rows - r) : zero();
      }
      store_transposed(block, packed + r * pitch + k / Words::kPack, pitch, rows - r);
    }
}

// What is read while a panel is packed lies `distance` numbers ahead of what is wanted next, of which packing asks for
// the first `runs`: columns where memory runs along k, else rows.
struct PackAhead {
  int64_t distance;
  int runs;
};

// Up to kPanel columns of w to a panel: [words][kPanel], columns padded with zeros to whole vectors. w[k][c] is
// w[k * k_stride + c * column_stride].
template <class Words>
static void pack_panel(const typename Words::Number* w, int64_t k_stride, int64_t column_stride, int columns, int depth,
                       float* packed, PackAhead ahead) {
  constexpr int kLineNumbers = 64 / int(sizeof(typename Words::Number));
  if (column_stride == 1) {
    for (int k = 0; k < depth; k += Words::kPack, w += Words::kPack * k_stride, packed += kPanel) {
      if (k < ahead.runs)
        for (int i = 0; i < Words::kPack; i++)
          for (int c = 0; c < columns; c += kLineNumbers) prefetch_far(w + i * k_stride + c + ahead.distance);
      for (int c = 0; c < columns; c += kLanes)
        store(packed + c, Words::across(w + c, k_stride, depth - k, columns - c));
    }
    return;
  }
  const int words = int(ceil_div(depth, Words::kPack));
  for (int c = 0; c < columns; c += kLanes, w += kLanes * column_stride, packed += kLanes)
    for (int at = 0; at < words; at += kLanes) {
      const int k = at * Words::kPack;
      Vec block[kLanes];
      if (c < ahead.runs && k % kLineNumbers == 0)
        for (int i = 0; i < kLanes; i++) prefetch_far(w + i * column_stride + k + ahead.distance);
      if (columns - c >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) block[i] = Words::along(w + i * column_stride + k, depth - k);
      } else {
        for (int i = 0; i < kLanes; i++)
          block[i] = i < columns - c ? Words::along(w + i * column_stride + k, depth - k) : zero();
      }
      store_transposed(block, packed + int64_t(at) * kPanel, kPanel, words - at);
    }
}

}  // namespace QF_ISA
}  // namespace qf
