// The one matrix product of the engine: C = start + A B on tiles that stay in registers.
//
// A is read one number at a time and broadcast, B by full vectors, so S = Q K^T needs K transposed (keys along the
// vector) and O = P V takes V unchanged. kMaxRows x kMaxVectors accumulators plus one row of B and one broadcast fill
// the register file: 24 + 4 + 1 of 32 on AVX-512, 12 + 2 + 1 of 16 elsewhere.
//
// Every element of C is one chain of multiply-adds in the order of the inner index, whatever the tile around it: a
// row's bits do not depend on which rows it is computed with.
#pragma once

#include "vec.h"

namespace qf {
namespace QF_ISA {

constexpr int kMaxRows = 6;
constexpr int kMaxVectors = kLanes == 16 ? 4 : 2;
constexpr int kPanel = kMaxVectors * kLanes;  // columns of B in one tile

// Memory to prefetch. A few lines are prefetched with every tile: all at once they would delay the loads of the product
// itself.
struct Ahead {
  const char *next = nullptr, *end = nullptr;

  void step() {
    constexpr int kLine = 64, kLines = 16;
    for (int i = 0; i < kLines && next < end; i++, next += kLine) __builtin_prefetch(next, 0, 2);
  }
};

// C[M][N vectors] = scale[row] * C (or 0, without kScaled) + A[M][depth] B[depth][N vectors]
template <int M, int N, bool kScaled>
static inline __attribute__((always_inline)) void multiply_tile(const float* a, int64_t lda, const float* b,
                                                                int64_t ldb, float* c, int64_t ldc, int64_t depth,
                                                                const float* scale) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[i][j] = kScaled ? load(c + i * ldc + j * kLanes) * broadcast(scale[i]) : zero();
  for (int64_t k = 0; k < depth; k++) {
    Vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) row[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const Vec x = broadcast(a[i * lda]);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i][j] = fma(x, row[j], sums[i][j]);
    }
    a++;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) store(c + i * ldc + j * kLanes, sums[i][j]);
}

// All rows against N vectors of columns. The loop is inside, because a tile's work is short enough for the overhead of
// a function call to matter.
template <int N, bool kScaled>
static void multiply_rows(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                          int64_t depth, const float* scale, Ahead& ahead) {
  for (; rows >= kMaxRows; rows -= kMaxRows) {
    ahead.step();
    multiply_tile<kMaxRows, N, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    a += kMaxRows * lda;
    c += kMaxRows * ldc;
    if (kScaled) scale += kMaxRows;
  }
  switch (rows) {
    case 1:
      return multiply_tile<1, N, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    case 2:
      return multiply_tile<2, N, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    case 3:
      return multiply_tile<3, N, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    case 4:
      return multiply_tile<4, N, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    case 5:
      return multiply_tile<5, N, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
  }
}

// C[rows][vectors] = start + A[rows][depth] B[depth][vectors], vectors in 1..kMaxVectors. The start is zero or, with
// kScaled, scale[row] * C.
template <bool kScaled>
static inline void multiply(int64_t rows, int vectors, const float* a, int64_t lda, const float* b, int64_t ldb,
                            float* c, int64_t ldc, int64_t depth, const float* scale, Ahead& ahead) {
  switch (vectors) {
    case 1:
      return multiply_rows<1, kScaled>(rows, a, lda, b, ldb, c, ldc, depth, scale, ahead);
    case 2:
      return multiply_rows<2, kScaled>(rows, a, lda, b, ldb, c, ldc, depth, scale, ahead);
    default:
      if constexpr (kMaxVectors > 2) {
        if (vectors == 3) return multiply_rows<3, kScaled>(rows, a, lda, b, ldb, c, ldc, depth, scale, ahead);
        return multiply_rows<4, kScaled>(rows, a, lda, b, ldb, c, ldc, depth, scale, ahead);
      }
  }
}

}  // namespace QF_ISA
}  // namespace qf
