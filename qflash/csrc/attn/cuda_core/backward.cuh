// The backward pass on CUDA cores, elementwise: a lane's scores become weights P, and P and dP become dS.
//
//   P = 2^(score - lse)     dS = P * slope * (dP - delta)     slope: of softcap, 1 without
#pragma once

#include "attn/cuda_core/softmax.cuh"

namespace qf {

// S, raw scores, becomes P. minus_lse(r, j): in base 2; seen(r, j): is the pair visible? Invisible pairs have a weight
// of 0. with_slope(weight, slope, r, j): the value to store for a weight, given the derivative of the cap.
template <int kCols, class MinusLse, class Seen, class WithSlope>
__device__ __forceinline__ void weigh(float (&S)[kRows][kCols], float scale, float softcap, MinusLse minus_lse,
                                      Seen seen, WithSlope with_slope) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      float score = S[r][j] * scale, slope = 1.0f;
      if (softcap != 0.0f) {
        const float x = score / softcap, z = ex2(-fabsf(x) * (2.0f * kLog2e));
        slope = 4.0f * z / ((1.0f + z) * (1.0f + z));  // 1 - tanh^2, which would cancel
        score = softcap * tanhf(x);
      }
      const float weight = seen(r, j) ? ex2(fmaf(score, kLog2e, minus_lse(r, j))) : 0.0f;
      S[r][j] = with_slope(weight, slope, r, j);
    }
}

template <int kCols>
__device__ __forceinline__ void multiply_rows(float (&P)[kRows][kCols], const float (&by)[kRows][kCols]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kCols; ++j) P[r][j] *= by[r][j];
}

// dP becomes dS, from P times the cap's derivative.
template <int kCols, class MinusDelta, class Seen>
__device__ __forceinline__ void differentiate(float (&dP)[kRows][kCols], const float (&P)[kRows][kCols],
                                              MinusDelta minus_delta, Seen seen) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kCols; ++j) dP[r][j] = seen(r, j) ? P[r][j] * (dP[r][j] + minus_delta(r, j)) : 0.0f;
}

}  // namespace qf
