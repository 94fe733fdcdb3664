// layer_norm of rows. The mean is a float and a correction, both computed relative to numbers of the row's own size, so
// that neither an offset nor a constant row costs accuracy.
#include "row_sums.h"

namespace qf {
namespace QF_ISA {
namespace {

struct Statistics {
  float mean, rest;  // the mean is mean + rest
  double variance;
};

// Of unit * x.
template <class Numbers>
Statistics statistics_of(Numbers numbers, const void* x, int64_t n, float unit) {
  const Vec units = broadcast(unit);
  const auto difference = [&](int64_t i, int64_t left, Vec from) {
    const Vec d = numbers.load(x, i, left) * units - from;
    return left >= kLanes ? d : first_or(d, int(left), zero());
  };
  const float first = unit * sum(numbers.load(x, 0, 1));
  const Vec near = broadcast(first);
  const float mean =
      float(first + sum_terms(n, [&](int64_t i, int64_t left) { return difference(i, left, near); }) / double(n));
  const Vec means = broadcast(mean);
  double sums[2];  // of differences and of their squares
  sum_terms(
      n,
      [&](int64_t i, int64_t left, Vec* terms) {
        terms[0] = difference(i, left, means);
        terms[1] = terms[0] * terms[0];
      },
      sums);
  const double rest = sums[0] / double(n), variance = sums[1] / double(n) - rest * rest;
  return {mean, float(rest), variance < 0 ? 0 : variance};
}

// Rows whose squares overflow float32 are recomputed in this unit, 2^-84.
constexpr float kSmallUnit = 5.169878828456423e-26f;
// So are rows whose squares vanish, in 2^96: where the variance is below 2^-100 and eps does not outweigh it. Different
// numbers of 2^20 and more have a larger variance.
constexpr float kLargeUnit = 7.922816251426434e28f, kLeastVariance = 7.888609052210118e-31f, kMostNarrow = 1048576.0f;

// The unit in which the statistics of a row are well inside float32's range, chosen by those in units of 1.
float unit_for(const Statistics& s, float eps) {
  if (!(s.variance < INFINITY)) return kSmallUnit;
  const bool vanishes = s.variance < kLeastVariance && eps < kLeastVariance;
  return vanishes && fabsf(s.mean) < kMostNarrow ? kLargeUnit : 1.0f;
}

template <class Numbers>
void normalise(Numbers numbers, const QfRowsParams& p, int64_t row) {
  const int64_t n = p.columns;
  const char* x = row_of(p.x, p.x_stride, row, p.dtype);
  char* out = row_of(p.out, p.out_stride, row, p.dtype);
  const void *weight = p.weight, *bias = p.bias;
  Statistics s = statistics_of(numbers, x, n, 1.0f);
  const float unit = unit_for(s, p.eps);
  if (unit != 1.0f) s = statistics_of(numbers, x, n, unit);
  const double rstd = 1.0 / sqrt(s.variance + double(p.eps) * unit * unit);
  // NaN where the row is nonfinite, whatever its mean would be.
  if (p.mean) p.mean[row] = float((double(s.mean) + s.rest + s.variance * 0) / unit);
  if (p.rstd) p.rstd[row] = float(rstd * unit);
  const Vec units = broadcast(unit), mean = broadcast(s.mean), rest = broadcast(s.rest);
  const Vec factor = broadcast(float(rstd));
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec z = ((numbers.load(x, i, n - i) * units - mean) - rest) * factor;
    if (weight) z = z * numbers.load(weight, i, n - i);
    if (bias) z = z + numbers.load(bias, i, n - i);
    numbers.store(out, i, z, n - i);
  }
}

}  // namespace

int layer_norm_rows(const QfRowsParams& p, int64_t begin, int64_t end) {
  if (p.columns == 0) return QF_OK;
  return with_numbers(p.dtype, [&](auto numbers) {
    for (int64_t row = begin; row < end; row++) normalise(numbers, p, row);
    return int(QF_OK);
  });
}

}  // namespace QF_ISA
}  // namespace qf
