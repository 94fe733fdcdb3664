// Activations of linear layers and their slopes, a vector at a time: the definitions of csrc/gemm/activation.cuh. NaN
// and infinities follow IEEE arithmetic: gelu and silu of -inf are NaN.
#pragma once

#include "qflash_ops.h"
#include "vec.h"

namespace qf {
namespace QF_ISA {

constexpr float kRootHalf = 0.70710678118654752f;     // sqrt(1/2)
constexpr float kRootTwoByPi = 0.79788456080286536f;  // sqrt(2/pi)
constexpr float kCubic = 0.044715f;

// The logistic distribution at z, 1 / (1 + exp(-z)): the share below it, and share (1 - share). Neither is a
// difference.
struct Logistic {
  Vec share, spread;
};

static inline Logistic logistic(Vec z) {
  const Vec e = exp(-vmax(z, -z)), larger = broadcast(1.0f) / (broadcast(1.0f) + e), smaller = e * larger;
  return {select_less(z, zero(), smaller, larger), smaller * larger};
}

// (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3))) / 2 is the logistic distribution at twice that argument.
static inline Logistic tanh_logistic(Vec h) {
  const Vec cubed = h * h * h;
  return logistic(broadcast(2.0f * kRootTwoByPi) * fma(broadcast(kCubic), cubed, h));
}

// The normal distribution at h: the share below it, and exp(-h^2 / 2).
struct Normal {
  Vec cdf, bell;
};

// The smaller tail is exp(-z^2) erfcx(z) / 2 with z = |h| / sqrt(2). A polynomial in t = 1 / (1 + 0.3 z) approximates
// erfcx(z) / t to 2.2e-8, so that both tails keep their relative accuracy, which 1 + erf(h) would lose.
static inline Vec smaller_tail(Vec magnitude, Vec bell) {
  const Vec t = broadcast(1.0f) / fma(broadcast(0.3f * kRootHalf), magnitude, broadcast(1.0f));
  Vec p = broadcast(-0.1287303864955902f);
  p = fma(p, t, broadcast(0.4816908538341522f));
  p = fma(p, t, broadcast(-0.5041870474815369f));
  p = fma(p, t, broadcast(0.5382891297340393f));
  p = fma(p, t, broadcast(-0.0879511833190918f));
  p = fma(p, t, broadcast(0.21195879578590393f));
  p = fma(p, t, broadcast(0.14913873374462128f));
  p = fma(p, t, broadcast(0.1705954372882843f));
  p = fma(p, t, broadcast(0.16919563710689545f));
  return broadcast(0.5f) * t * p * bell;
}

static inline Normal normal(Vec h) {
  const Vec bell = exp(broadcast(-0.5f) * h * h);
  const Vec tail = smaller_tail(vmax(h, -h), bell);
  return {select_less(h, zero(), tail, broadcast(1.0f) - tail), bell};
}

// The activation of h. SwiGLU: of the two products h and u.
template <int kActivation>
static inline Vec activated(Vec h, Vec u) {
  if constexpr (kActivation == QF_GELU) return h * normal(h).cdf;
  if constexpr (kActivation == QF_GELU_TANH) return h * tanh_logistic(h).share;
  if constexpr (kActivation == QF_SILU) return h * logistic(h).share;
  if constexpr (kActivation == QF_SWIGLU) return h * logistic(h).share * u;
  return h;
}

// The factors from the gradient of the result to that of h (`of_h`) and, with SwiGLU, of u (`of_u`).
struct Slopes {
  Vec of_h, of_u;
};

template <int kActivation>
static inline Slopes slopes(Vec h, Vec u) {
  if constexpr (kActivation == QF_GELU) {
    const Normal at = normal(h);
    return {fma(h * at.bell, broadcast(0.5f * kRootTwoByPi), at.cdf), zero()};  // 1 / sqrt(2 pi) = sqrt(2 / pi) / 2
  }
  if constexpr (kActivation == QF_GELU_TANH) {
    const Logistic at = tanh_logistic(h);
    const Vec squared = vmin(broadcast(1e4f), h * h);  // where it overflows, the spread is already 0
    const Vec inner = fma(broadcast(6.0f * kRootTwoByPi * kCubic), squared, broadcast(2.0f * kRootTwoByPi));
    return {fma(h * at.spread, inner, at.share), zero()};
  }
  if constexpr (kActivation == QF_SILU || kActivation == QF_SWIGLU) {
    const Logistic at = logistic(h);
    const Vec slope = fma(h, at.spread, at.share);
    if constexpr (kActivation == QF_SWIGLU) return {slope * u, h * at.share};
    return {slope, zero()};
  }
  return {broadcast(1.0f), zero()};
}

// visit.run<activation>(): `activation` as a constant.
template <class Visit>
static inline void with_activation(int32_t activation, Visit&& visit) {
  switch (activation) {
    case QF_GELU:
      return visit.template run<QF_GELU>();
    case QF_GELU_TANH:
      return visit.template run<QF_GELU_TANH>();
    case QF_SILU:
      return visit.template run<QF_SILU>();
    case QF_SWIGLU:
      return visit.template run<QF_SWIGLU>();
    default:
      return visit.template run<QF_IDENTITY>();
  }
}

}  // namespace QF_ISA
}  // namespace qf
