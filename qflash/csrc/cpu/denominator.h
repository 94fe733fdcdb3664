// The denominator of a row once its sink, a logit more, has joined it.
#pragma once

#include <math.h>

namespace qf {
namespace QF_ISA {

struct Denominator {
  float l;  // what the row's sums are divided by, relative to m
  double lse;
};

// m: the row's largest score, -inf where nothing that it sees is above; l: the sum of exp(score - m). sink: -inf is
// none.
static inline Denominator denominator(double m, float l, double sink) {
  const double of_keys = l == 0.0f ? double(NAN) : m + ::log(double(l));
  if (sink == -INFINITY) return {l, of_keys};
  if (l == 0.0f)
    return {__builtin_isnan(sink) ? float(NAN) : INFINITY, sink};  // scores of -inf have no weight beside a sink
  const double top = of_keys > sink ? of_keys : sink, least = of_keys > sink ? sink : of_keys;
  const bool infinite = sink == INFINITY && __builtin_isfinite(of_keys);  // inf - inf would be NaN
  return {float(l + ::exp(sink - m)), infinite ? sink : top + ::log1p(::exp(least - top))};
}

}  // namespace QF_ISA
}  // namespace qf
