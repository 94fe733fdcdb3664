// The product of packed blocks: C = A B, or C += A B, on tiles that stay in registers, as in multiply.h.
//
// A is rows of words, `pitch` apart, B panels of kPanel words for each word of A's rows. A word is a float32, or as
// many narrower numbers of consecutive k as fit four bytes: what Words::dot multiplies and adds up.
#pragma once

#include "linear_ahead.h"
#include "multiply.h"
#include "sizes.h"

namespace qf {
namespace QF_ISA {

constexpr int kRowStep = kMaxRows;

// Steps of Wanted in the product of a panel.
static inline int64_t product_steps(int rows, int, int words) { return ceil_div(rows, kRowStep) * words; }

// C[M][N vectors] = (C, unless kFirst) + A[M][words] B[words][N vectors]. The sum of a chunk starts from zero: shorter
// chains round less.
template <class Words, int M, int N, bool kFirst>
static inline __attribute__((always_inline)) void product_tile(const float* a, int64_t pitch, const float* b, float* c,
                                                               int64_t ldc, int words, Wanted& ahead) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[i][j] = zero();
  for (int k = 0; k < words; k++, b += kPanel) {
    ahead.step();
    Vec row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) row[j] = load(b + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; i++) {
      const Vec x = broadcast(a[i * pitch + k]);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) sums[i][j] = Words::dot(x, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      float* to = c + i * ldc + j * kLanes;
      store(to, kFirst ? sums[i][j] : load(to) + sums[i][j]);
    }
}

template <class Words, int M, int N, bool kFirst>
static void product_rows(int rows, const float* a, int64_t pitch, const float* b, float* c, int64_t ldc, int words,
                         Wanted& ahead) {
  for (; rows >= M; rows -= M, a += M * pitch, c += M * ldc) {
    ahead.tile();
    product_tile<Words, M, N, kFirst>(a, pitch, b, c, ldc, words, ahead);
  }
  if constexpr (M > 1)
    if (rows > 0) product_rows<Words, M - 1, N, kFirst>(rows, a, pitch, b, c, ldc, words, ahead);
}

template <class Words, int N, bool kFirst>
static inline void product_vectors(int vectors, int rows, const float* a, int64_t pitch, const float* b, float* c,
                                   int64_t ldc, int words, Wanted& ahead) {
  if (vectors == N) return product_rows<Words, kMaxRows, N, kFirst>(rows, a, pitch, b, c, ldc, words, ahead);
  if constexpr (N > 1) product_vectors<Words, N - 1, kFirst>(vectors, rows, a, pitch, b, c, ldc, words, ahead);
}

// C[rows][vectors] (+)= A B for one panel, vectors in 1..kMaxVectors.
template <class Words>
static inline void product(int vectors, int rows, const float* a, int64_t pitch, const float* b, float* c, int64_t ldc,
                           int words, bool first, Wanted& ahead) {
  if (first)
    product_vectors<Words, kMaxVectors, true>(vectors, rows, a, pitch, b, c, ldc, words, ahead);
  else
    product_vectors<Words, kMaxVectors, false>(vectors, rows, a, pitch, b, c, ldc, words, ahead);
}

}  // namespace QF_ISA
}  // namespace qf
