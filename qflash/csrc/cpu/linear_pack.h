// Blocks of x and w as words (linear_words.h) in the order the product reads them.
#pragma once

#include "linear_ahead.h"
#include "linear_words.h"
#include "multiply.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {

static inline int smaller(int64_t a, int64_t b) { return int(a < b ? a : b); }

// Packs words of memory that runs along k, kLanes of each of kLanes lines, `stride` numbers apart, to `packed`: word by
// word. All of them exist, and nothing is indexed by a variable: the square never leaves the registers.
template <class Words>
static inline __attribute__((always_inline)) void pack_square(const typename Words::Number* lines, int64_t stride,
                                                              float* packed, int64_t pitch) {
  Vec square[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) square[i] = Words::along(lines + i * stride, kLanes * Words::kPack);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) store(packed + i * pitch, square[i]);
}

// The same where only `count` lines of `depth` numbers are left.
template <class Words>
static __attribute__((noinline)) void pack_part_of_square(const typename Words::Number* lines, int64_t stride,
                                                          int count, int depth, float* packed, int64_t pitch) {
  Vec square[kLanes];
  for (int i = 0; i < kLanes; i++) square[i] = i < count ? Words::along(lines + i * stride, depth) : zero();
  transpose(square);
  for (int i = 0; i < kLanes && i * Words::kPack < depth; i++) store(packed + i * pitch, square[i]);
}

// Words of memory that runs across k, kLanes neighbours of each, to rows of words, `pitch` apart.
template <class Words>
static inline __attribute__((always_inline)) void turn_square(const typename Words::Number* x, int64_t k_stride,
                                                              float* packed, int64_t pitch) {
  Vec square[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    square[i] = Words::across(x + i * Words::kPack * k_stride, k_stride, Words::kPack, kLanes);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) store(packed + i * pitch, square[i]);
}

// The same where only `rows` neighbours and `depth` numbers of each are left.
template <class Words>
static __attribute__((noinline)) void turn_part_of_square(const typename Words::Number* x, int64_t k_stride, int rows,
                                                          int depth, float* packed, int64_t pitch) {
  Vec square[kLanes];
  for (int i = 0; i < kLanes; i++) {
    const int k = i * Words::kPack;
    square[i] = k < depth ? Words::across(x + k * k_stride, k_stride, depth - k, rows) : zero();
  }
  transpose(square);
  for (int i = 0; i < kLanes && i < rows; i++) store(packed + i * pitch, square[i]);
}

// Rows of x to rows of words, `pitch` apart, whole vectors of them. x[r][c] is x[r * row_stride + c * k_stride].
template <class Words>
static void pack_x(const typename Words::Number* x, int64_t row_stride, int64_t k_stride, int rows, int depth,
                   float* packed, int64_t pitch) {
  constexpr int kNumbers = kLanes * Words::kPack;  // of a vector of words
  if (k_stride == 1) {
    for (int r = 0; r < rows; r++, x += row_stride, packed += pitch) {
      int k = 0;
      for (; depth - k >= kNumbers; k += kNumbers) store(packed + k / Words::kPack, Words::along(x + k, kNumbers));
      if (k < depth) store(packed + k / Words::kPack, Words::along(x + k, depth - k));
    }
    return;
  }
  for (int r = 0; r < rows; r += kLanes)
    for (int k = 0; k < depth; k += kNumbers) {
      const auto* from = x + r + k * k_stride;
      float* to = packed + r * pitch + k / Words::kPack;
      if (rows - r >= kLanes && depth - k >= kNumbers)
        turn_square<Words>(from, k_stride, to, pitch);
      else
        turn_part_of_square<Words>(from, k_stride, rows - r, depth - k, to, pitch);
    }
}

// What is read while a panel is packed is `distance` numbers before what is needed next, of which packing prefetches
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
  constexpr int kNumbers = kLanes * Words::kPack;
  for (int c = 0; c < columns; c += kLanes, w += kLanes * column_stride, packed += kLanes)
    for (int k = 0; k < depth; k += kNumbers) {
      if (c < ahead.runs && k % kLineNumbers == 0)
        for (int i = 0; i < kLanes; i++) prefetch_far(w + i * column_stride + k + ahead.distance);
      float* to = packed + int64_t(k / Words::kPack) * kPanel;
      if (columns - c >= kLanes && depth - k >= kNumbers)
        pack_square<Words>(w + k, column_stride, to, kPanel);
      else
        pack_part_of_square<Words>(w + k, column_stride, columns - c, depth - k, to, kPanel);
    }
}

}  // namespace QF_ISA
}  // namespace qf
