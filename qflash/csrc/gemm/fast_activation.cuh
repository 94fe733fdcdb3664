// The activations of activation.cuh in as few instructions as their accuracy allows, for epilogues that stall the
// tensor cores. NaN and infinities propagate as in activation.cuh.
//
//   gelu               within 5e-5 of the definition, absolute: a polynomial, no special functions
//   gelu_tanh          for 16-bit results within 8e-5, also by a polynomial; for float32 results as below
//   silu, swiglu       float32, except for the last bits of ex2 and rcp
//
// A polynomial takes 11 instructions of one cycle per warp, ex2 and rcp 8 cycles each.
#pragma once

#include "gemm/activation.cuh"
#include "ptx/ex2.cuh"
#include "ptx/fma.cuh"
#include "ptx/rcp.cuh"

namespace qf {
namespace gemm {

constexpr float kLog2E = 1.44269504088896341f;

// 1 / (1 + e^-h) for minus_h = -log2(e) h.
__device__ __forceinline__ float sigmoid_of_log2(float minus_h) { return rcp(1.0f + ex2(minus_h)); }

// Phi(h) = saturated(1/2 + h Q(h^2)): Q is fitted for the lowest error of h Phi(h) on [0, c = 4.4], with c Q(c^2) =
// 1/2. Beyond c, h Q(h^2) increases, because the leading coefficient is positive, and saturation gives 0 or 1.
__device__ __forceinline__ float fast_normal_cdf(float h) {
  const float t = h * h;
  float q = 3.569430515e-11f;
  q = fmaf(q, t, -3.754050404e-09f);
  q = fmaf(q, t, 1.740847893e-07f);
  q = fmaf(q, t, -4.724869541e-06f);
  q = fmaf(q, t, 8.429303125e-05f);
  q = fmaf(q, t, -1.054992550e-03f);
  q = fmaf(q, t, 9.643028490e-03f);
  q = fmaf(q, t, -6.607642770e-02f);
  q = fmaf(q, t, 3.987616003e-01f);
  return fma_saturated(h, q, 0.5f);
}

// The same for (1 + tanh(sqrt(2 / pi) (h + 0.044715 h^3))) / 2, with one coefficient less. The leading one is negative,
// so that h^2 is clamped to c^2.
__device__ __forceinline__ float fast_tanh_cdf(float h) {
  constexpr float kClip = 4.0f;
  const float t = fminf(h * h, kClip * kClip);
  float q = -1.135385341e-09f;
  q = fmaf(q, t, 9.554157288e-08f);
  q = fmaf(q, t, -3.490057679e-06f);
  q = fmaf(q, t, 7.346257917e-05f);
  q = fmaf(q, t, -1.002627891e-03f);
  q = fmaf(q, t, 9.507399984e-03f);
  q = fmaf(q, t, -6.585031748e-02f);
  q = fmaf(q, t, 3.984777629e-01f);
  return fma_saturated(h, q, 0.5f);
}

// As activated(). kRounded: the result is rounded to 16 bits, which hides the error of the polynomial.
template <int kActivation, bool kRounded>
__device__ __forceinline__ float fast_activated(float h, float u) {
  if constexpr (kActivation == QF_GELU) return h * fast_normal_cdf(h);
  if constexpr (kActivation == QF_GELU_TANH && kRounded) return h * fast_tanh_cdf(h);
  if constexpr (kActivation == QF_GELU_TANH) {
    constexpr float kFirst = -2.0f * kLog2E * kRootTwoByPi;
    return h * sigmoid_of_log2(h * fmaf(h * h, kFirst * kCubic, kFirst));
  }
  if constexpr (kActivation == QF_SILU) return h * sigmoid_of_log2(-kLog2E * h);
  if constexpr (kActivation == QF_SWIGLU) return h * sigmoid_of_log2(-kLog2E * h) * u;
  return h;
}

}  // namespace gemm
}  // namespace qf
