// The product of few rows of x and a panel of w, read in place: so few that packing the panel, which stores it and
// loads it again, would take longer than multiplying it. Sums have the order of linear_tile.h, so their bits are the
// same.
#pragma once

#include "linear_pack.h"

namespace qf {
namespace QF_ISA {

// Rows of x that are few where memory runs along columns.
constexpr int kFewRows = 4;
// Where it runs along k: packing pays off earlier, because the multiply-adds of a column depend on each other.
constexpr int kFewRowsAlongK = 2;
// Columns of a block of such rows: so few that the processor's own prefetcher follows each.
constexpr int kFewColumns = 2 * kLanes;

// Where memory runs along columns: vectors of them that one row of x is multiplied by in registers, a full block's on
// AVX-512; how many lines of w ahead the same columns are prefetched, and for how many columns that pays off.
constexpr int kWidest = kLanes == 16 ? 16 : 8, kLinesAhead = 16, kStreamed = 32;

// Whether so many rows are multiplied without packing. Only float32: along k, products of pairs depend on each other
// for longer, and a square of 16-bit numbers fills half of each line.
template <class Words>
constexpr bool are_few(int rows, bool along_k) {
  return sizeof(typename Words::Number) == 4 && rows <= (along_k ? kFewRowsAlongK : kFewRows);
}

// kLanes words of each of kLanes columns of memory that runs along k; `columns` and `depth` numbers of them exist.
template <class Words>
static inline __attribute__((always_inline)) void load_square(const typename Words::Number* w, int64_t column_stride,
                                                              int columns, int depth, Vec* square) {
  if (columns >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) square[i] = Words::along(w + i * column_stride, depth);
  } else {
    for (int i = 0; i < kLanes; i++) square[i] = i < columns ? Words::along(w + i * column_stride, depth) : zero();
  }
}

// A part of a product: x [rows, pitch], packed; w in memory, up to kPanel columns of it; sums c [rows, ldc].
template <class Words>
struct FewRows {
  const float* x;
  int64_t pitch;
  const typename Words::Number* w;
  int64_t k_stride, column_stride;
  int columns, depth;
  float* c;
  int64_t ldc;
  bool first;  // sums are stored, not added to what is there

  template <int M>
  void store_sums(const Vec* sums, int column) const {
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      float* to = c + i * ldc + column;
      store(to, first ? sums[i] : load(to) + sums[i]);
    }
  }

  // Memory runs along k: N times kLanes columns from `column` on. Squares of words are transposed in registers. Columns
  // are interleaved, because the multiply-adds of a chain depend on each other.
  template <int M, int N = kFewColumns / kLanes>
  void multiply_along_k(int column) const {
    Vec sums[N][M];
    for (int j = 0; j < N; j++)
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sums[j][i] = zero();
    for (int word = 0; word * Words::kPack < depth; word += kLanes) {
      const int k = word * Words::kPack;
#pragma GCC unroll 1  // two squares at once do not fit the registers
      for (int j = 0; j < N; j++) {
        const int at = column + j * kLanes;
        const auto* from = w + at * column_stride;
        Vec square[kLanes], chains[M];
        load_square<Words>(from + k, column_stride, columns - at, depth - k, square);
        transpose(square);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) chains[i] = sums[j][i];
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; l++)
#pragma GCC unroll 8
          for (int i = 0; i < M; i++) chains[i] = Words::dot(broadcast(x[i * pitch + word + l]), square[l], chains[i]);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) sums[j][i] = chains[i];
      }
    }
    for (int j = 0; j < N; j++) store_sums<M>(sums[j], column + j * kLanes);
  }

  // Memory runs along columns: N vectors of them from `column` on, whole ones unless N is 1.
  template <int M, int N>
  void multiply_along_n(int column) const {
    Vec sums[N][M];
#pragma GCC unroll 16
    for (int j = 0; j < N; j++)
#pragma GCC unroll 8
      for (int i = 0; i < M; i++) sums[j][i] = zero();
    const auto* from = w + column;
    // A piece of a line is no stream: the next piece is needed sooner than the lines below.
    const int64_t distance = N * kLanes >= kStreamed ? kLinesAhead * k_stride : N * kLanes;
    for (int k = 0, word = 0; k < depth; k += Words::kPack, word++, from += Words::kPack * k_stride) {
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) prefetch_far(from + j * kLanes + distance);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) {
        const Vec words = Words::across(from + j * kLanes, k_stride, depth - k, N > 1 ? kLanes : columns - column);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) sums[j][i] = Words::dot(broadcast(x[i * pitch + word]), words, sums[j][i]);
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) store_sums<M>(sums[j], column + j * kLanes);
  }

  // All columns from `column` on, as many vectors at a time as there are, up to N.
  template <int M, int N>
  void multiply_columns(int column) const {
    for (; columns - column >= N * kLanes || (N == 1 && column < columns); column += N * kLanes)
      multiply_along_n<M, N>(column);
    if constexpr (N > 1) multiply_columns<M, N / 2>(column);
  }

  template <int M>
  void multiply() const {
    int column = 0;
    if (column_stride == 1) {
      multiply_columns<M, kWidest / (M == 1 ? 1 : M < 4 ? 2 : 4)>(column);
    } else if constexpr (M <= kFewRowsAlongK) {
      for (; columns - column >= kFewColumns; column += kFewColumns) multiply_along_k<M>(column);
      for (; column < columns; column += kLanes) multiply_along_k<M, 1>(column);
    }
  }

  // For `rows` rows of x, up to kFewRows.
  void multiply(int rows) const {
    switch (rows) {
      case 1:
        return multiply<1>();
      case 2:
        return multiply<2>();
      case 3:
        return multiply<3>();
      default:
        return multiply<4>();
    }
  }
};

}  // namespace QF_ISA
}  // namespace qf
