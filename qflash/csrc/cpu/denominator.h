// The denominator of a row after its sink, one more logit, has been added.
#pragma once

#include <math.h>

namespace qf {
namespace QF_ISA {

struct Denominator {
  float l;  // what the row's sums are divided by, relative to m
  double lse;
};

// m: the row's largest score, -inf if every score it sees is -inf; l: the sum of exp(score - m). sink: -inf means none.
static inline Denominator denominator(double m, float l, double sink) {
  const double of_keys = l == 0.0f ? double(NAN) : m + ::log(double(l));
  if (sink == -INFINITY) return {l, of_keys};
  if (l == 0.0f)
    return {__builtin_isnan(sink) ? float(NAN) : INFINITY, sink};  // scores of -inf have no weight next to a sink
  const double top = of_keys > sink ? of_keys : sink, least = of_keys > sink ? sink : of_keys;
  const bool infinite = sink == INFINITY && __builtin_isfinite(of_keys);  // inf - inf would be NaN
  return {float(l + ::exp(sink - m)), infinite ? sink : top + ::log1p(::exp(least - top))};
}

}  // namespace QF_ISA
}  // namespace qf
