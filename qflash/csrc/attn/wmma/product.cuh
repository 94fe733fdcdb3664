// The two matrix products through wmma, from padded shared memory. Fragments are opaque (ptx/wmma.cuh), so every
// operation on a row (its maximum, its weights, its output) is done in shared memory, or by a fragment of factors that
// has the same layout as the one it multiplies.
#pragma once

#include "common/wmma.cuh"

namespace qf {

// S = Q Kt, stored in shared memory by columns: the score of row r and key j at s_scores[j * kScoreStride + r]. s_q:
// the warp's kMTiles * 16 rows, s_k: kNTiles * 16 keys; both with kDepth channels, kStride elements per row.
// Per 16 channels: kMTiles + kNTiles fragment loads for kMTiles * kNTiles products.
template <int kMTiles, int kNTiles, int kDepth, int kStride, int kScoreStride, class Element>
__device__ __forceinline__ void qk_wmma(float* s_scores, const Element* s_q, const Element* s_k) {
  using W = Wmma<Element>;
  float S[kMTiles][kNTiles][8] = {};
#pragma unroll
  for (int d = 0; d < kDepth; d += 16) {
    typename W::Operand q[kMTiles];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) W::load_a(q[i], s_q + 16 * i * kStride + d, kStride);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      typename W::Operand k;
      W::load_b_col(k, s_k + 16 * j * kStride + d, kStride);
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) W::multiply_col(S[i][j], q[i], k);
    }
  }
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) wmma_store_col(s_scores + 16 * j * kScoreStride + 16 * i, S[i][j], kScoreStride);
}

// O += P V. s_p: weights of the warp's rows by rows, kPStride elements apart; s_v: kKeys keys.
// Per 16 keys: kMTiles + kOTiles fragment loads for kMTiles * kOTiles products.
template <int kKeys, int kPStride, int kStride, int kMTiles, int kOTiles, class Element>
__device__ __forceinline__ void pv_wmma(float (&O)[kMTiles][kOTiles][8], const Element* s_p, const Element* s_v) {
  using W = Wmma<Element>;
#pragma unroll
  for (int n = 0; n < kKeys; n += 16) {
    typename W::Operand p[kMTiles];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) W::load_a(p[i], s_p + 16 * i * kPStride + n, kPStride);
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      typename W::Operand v;
      W::load_b_row(v, s_v + n * kStride + 16 * j, kStride);
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) W::multiply_row(O[i][j], p[i], v);
    }
  }
}

// Multiplies row r of O by s_factors[r * kFactorStride + any of 16 columns]: loaded as accumulators, the factors have
// the same positions as the rows' accumulators, wherever these are.
template <int kFactorStride, int kMTiles, int kOTiles>
__device__ __forceinline__ void scale_rows(float (&O)[kMTiles][kOTiles][8], const float* s_factors) {
#pragma unroll
  for (int i = 0; i < kMTiles; ++i) {
    float factors[8];
    wmma_load_c_row(factors, s_factors + 16 * i * kFactorStride, kFactorStride);
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 8; ++e) O[i][j][e] *= factors[e];
  }
}

}  // namespace qf
