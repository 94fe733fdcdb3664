// tanh for softcap * tanh(s / softcap), on the scores of a tile.
//
// Arguments are small: |s| <= softcap except for the scores that the cap exists for. In that range a polynomial on the
// FMA units is enough, and leaves the special-function unit to the exponentials: tanh(y) = y P(y^2), with P of degree 5
// fitted to tanh(y) / y on 0 <= y^2 <= 1 for the lowest relative error, 6e-7. The error is relative to the score, so it
// holds for any softcap, however large. Beyond, tanh(y) = 1 - 2 / (1 + e^2y), with an absolute error of 1e-7.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "attn/mma/softmax.cuh"
#include "ptx/ex2.cuh"
#include "ptx/order.cuh"
#include "ptx/rcp.cuh"

namespace qf {
namespace wgmma {

__device__ __forceinline__ float tanh_of_small(float y) {
  const float square = y * y;
  float p = fmaf(square, -0.0030670483f, 0.016743084f);
  p = fmaf(square, p, -0.051605646f);
  p = fmaf(square, p, 0.13281433f);
  p = fmaf(square, p, -0.33329043f);
  return y * fmaf(square, p, 0.9999994f);
}
__device__ __forceinline__ float tanh_coarsely(float y) {
  return fmaf(-2.0f, rcp(1.0f + ex2(2.0f * kLog2e * y)), 1.0f);
}
__device__ __forceinline__ float tanh_of_any(float y) { return fabsf(y) > 1.0f ? tanh_coarsely(y) : tanh_of_small(y); }

// The cap is multiplied inside the exponential, exactly, if the reference maximum, which is rounded, is still close
// enough to such a product.
__device__ __forceinline__ bool fuses_cap(float softcap) { return softcap > 0.0f && softcap < 65536.0f; }

// kPolynomials of the four elements of S per block use the polynomial, the others the special-function unit: two, if
// exponentials are the bound, which keeps both units equally busy; none, if the tensor cores are the bound.
template <int kPolynomials>
__device__ __forceinline__ float tanh_mixed(float y, int e) {
  return e < kPolynomials ? tanh_of_small(y) : tanh_coarsely(y);
}
// Can tanh_mixed() be used for the whole warp? coarsely: softens_coarsely(), an absolute error of 1e-7 is enough.
template <int kPolynomials, int kNTiles>
__device__ __forceinline__ bool suits_mixed(const float (&S)[1][kNTiles][4], float factor, bool coarsely) {
  float most[4] = {};
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < kPolynomials; ++e) most[e] = fmaxf(most[e], fabsf(S[0][j][e]));
  return __all_sync(0xffffffffu, coarsely && !(fmaxf(most[0], most[1]) * fabsf(factor) > 1.0f));
}

// S becomes tanh(factor S).
template <int kPolynomials, int kNTiles>
__device__ __forceinline__ void take_tanh(float (&S)[1][kNTiles][4], float factor, bool mixed) {
  if (mixed) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][j][e] = tanh_mixed<kPolynomials>(S[0][j][e] * factor, e);
  } else {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
      if (!never(int(fabsf(factor) > 0.0f))) {  // not all of them interleaved, or registers run out
#pragma unroll
        for (int e = 0; e < 4; ++e) S[0][j][e] = tanh_of_any(S[0][j][e] * factor);
      }
  }
}

}  // namespace wgmma
}  // namespace qf
