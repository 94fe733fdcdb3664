// Online softmax on register fragments, in base 2: scores arrive multiplied by log2(e).
#pragma once

#include "attn/cuda_core/product.cuh"
#include "common/elements.cuh"
#include "ptx/ex2.cuh"
#include "reduce/lanes.cuh"

namespace qf {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// What q is multiplied by when loaded, so that q.k is the base-2 score, or the argument of softcap's tanh.
__device__ __forceinline__ float query_scale(float scale, float softcap) {
  return softcap == 0.0f ? scale * kLog2e : scale / softcap;
}

template <int kCols>
__device__ __forceinline__ void apply_softcap(float (&S)[kRows][kCols], float softcap) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kCols; ++j) S[r][j] = softcap * kLog2e * tanhf(S[r][j]);
}

// The reference of the weights for a running maximum m: -inf - -inf would be NaN.
__device__ __forceinline__ float reference_of(float m) { return m == -infinity() ? 0.0f : m; }

// One tile: S becomes the weights 2^(S - m). The running maximum m of the lane's r-th row is s_m[r * kMaxStep], one for
// the whole row, written by the lane that `leads` it; the running sum of the lane's own weights is s_l[r * kSumStep]
// (reduced over lanes once, at the end). They are in shared memory between tiles because registers are scarcer. rescale
// returns the factors for O. A row that has seen only -inf so far keeps weights 0; fmaxf ignores NaN, which reaches the
// sum through its weight.
template <int X, int kMaxStep, int kSumStep, int kCols>
__device__ __forceinline__ void online_softmax(float (&S)[kRows][kCols], float* s_m, float* s_l, bool leads,
                                               float (&rescale)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float top = S[r][0];
#pragma unroll
    for (int j = 1; j < kCols; ++j) top = fmaxf(top, S[r][j]);
    const float m = s_m[r * kMaxStep];
    top = fmaxf(m, max_across_x<X>(top));
    const float reference = reference_of(top);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      S[r][j] = ex2(S[r][j] - reference);
      sum += S[r][j];
    }
    rescale[r] = ex2(m - reference);
    s_l[r * kSumStep] = fmaf(s_l[r * kSumStep], rescale[r], sum);
    __syncwarp();  // every lane of the row has read m
    if (leads) s_m[r * kMaxStep] = top;
  }
}

// Rescales O to the new maxima of its rows.
template <int kCols>
__device__ __forceinline__ void scale_rows(float (&O)[kRows][kCols], const float (&rescale)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) O[r][c] *= rescale[r];
}

// Natural-log lse from a base-2 maximum and the row's complete sum. A row whose scores were all -inf has none.
__device__ __forceinline__ float lse_of(float m, float l) { return l == 0.0f ? nan() : (m + log2f(l)) * kLn2; }

}  // namespace qf
