// The one matrix product of the engine: C = start + A B on tiles that stay in registers.
//
// A is read one number at a time and broadcast, B by whole vectors, so S = Q K^T wants K transposed (keys along the
// vector) and O = P V takes V as it is. kMaxRows x kMaxVectors accumulators plus one row of B and one broadcast fill
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

// C[M][N vectors] = scale[row] * C (or 0, without kScaled) + A[M][depth] B[depth][N vectors]
template <int M, int N, bool kScaled>
static void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                          int64_t depth, const float* scale) {
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

template <int M, bool kScaled>
static inline void multiply_vectors(int vectors, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                                    int64_t ldc, int64_t depth, const float* scale) {
  switch (vectors) {
    case 1:
      return multiply_tile<M, 1, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    case 2:
      return multiply_tile<M, 2, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
    default:
      if constexpr (kMaxVectors > 2) {
        if (vectors == 3) return multiply_tile<M, 3, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
        return multiply_tile<M, 4, kScaled>(a, lda, b, ldb, c, ldc, depth, scale);
      }
  }
}

// C[rows][vectors], rows in 1..kMaxRows, vectors in 1..kMaxVectors. kScaled: C is multiplied by scale[row] first.
template <bool kScaled>
static inline void multiply(int rows, int vectors, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                            int64_t ldc, int64_t depth, const float* scale = nullptr) {
  switch (rows) {
    case 1:
      return multiply_vectors<1, kScaled>(vectors, a, lda, b, ldb, c, ldc, depth, scale);
    case 2:
      return multiply_vectors<2, kScaled>(vectors, a, lda, b, ldb, c, ldc, depth, scale);
    case 3:
      return multiply_vectors<3, kScaled>(vectors, a, lda, b, ldb, c, ldc, depth, scale);
    case 4:
      return multiply_vectors<4, kScaled>(vectors, a, lda, b, ldb, c, ldc, depth, scale);
    case 5:
      return multiply_vectors<5, kScaled>(vectors, a, lda, b, ldb, c, ldc, depth, scale);
    default:
      return multiply_vectors<6, kScaled>(vectors, a, lda, b, ldb, c, ldc, depth, scale);
  }
}

}  // namespace QF_ISA
}  // namespace qf
