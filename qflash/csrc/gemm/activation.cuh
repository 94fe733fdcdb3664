// Activations of linear layers and their derivatives, in float32. NaN and infinities propagate as in IEEE arithmetic
// and in the definitions: gelu and silu of -inf are NaN.
#pragma once

#include <math.h>

#include "qflash_ops.h"

namespace qf {
namespace gemm {

constexpr float kRootHalf = 0.70710678118654752f;     // sqrt(1/2)
constexpr float kRootTwoByPi = 0.79788456080286536f;  // sqrt(2/pi)
constexpr float kCubic = 0.044715f;

__device__ __forceinline__ float normal_cdf(float h) { return 0.5f + 0.5f * erff(h * kRootHalf); }
__device__ __forceinline__ float sigmoid(float h) { return 1.0f / (1.0f + expf(-h)); }

// (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3))) / 2, which is the sigmoid of twice tanh's argument.
__device__ __forceinline__ float tanh_cdf(float h) { return sigmoid(2.0f * kRootTwoByPi * (h + kCubic * h * h * h)); }

// The activation of h; for SwiGLU, of the two products h and u.
template <int kActivation>
__device__ __forceinline__ float activated(float h, float u) {
  if constexpr (kActivation == QF_GELU) return h * normal_cdf(h);
  if constexpr (kActivation == QF_GELU_TANH) return h * tanh_cdf(h);
  if constexpr (kActivation == QF_SILU) return h * sigmoid(h);
  if constexpr (kActivation == QF_SWIGLU) return h * sigmoid(h) * u;
  return h;
}

// The derivatives: factors from the gradient of the result to that of h (`of_h`) and, for SwiGLU, of u (`of_u`).
struct Slopes {
  float of_h, of_u;
};

template <int kActivation>
__device__ __forceinline__ Slopes slopes(float h, float u) {
  if constexpr (kActivation == QF_GELU) {
    const float density = 0.5f * kRootTwoByPi * expf(-0.5f * h * h);  // 1 / sqrt(2 pi) = sqrt(2 / pi) / 2
    return {normal_cdf(h) + h * density, 0.0f};
  }
  if constexpr (kActivation == QF_GELU_TANH) {
    const float cdf = tanh_cdf(h);
    const float squared = fminf(h * h, 1e4f);  // cdf (1 - cdf) is 0 long before h^2 overflows
    return {cdf + h * cdf * (1.0f - cdf) * 2.0f * kRootTwoByPi * (1.0f + 3.0f * kCubic * squared), 0.0f};
  }
  if constexpr (kActivation == QF_SILU || kActivation == QF_SWIGLU) {
    const float s = sigmoid(h), slope = s * (1.0f + h * (1.0f - s));
    if constexpr (kActivation == QF_SWIGLU) return {slope * u, h * s};
    return {slope, 0.0f};
  }
  return {1.0f, 0.0f};
}

}  // namespace gemm
}  // namespace qf
