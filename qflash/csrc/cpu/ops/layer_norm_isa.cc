// layer_norm of rows. The mean is a float and a correction, both found relative to numbers of the row's own size, so
// that neither an offset nor a constant row costs accuracy.
#include "memory.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {
namespace {

struct Statistics {
  float mean, rest;  // the mean is mean + rest
  double variance;
};

// Of unit * x.
Statistics statistics_of(const float* x, int64_t n, float unit) {
  const Vec units = broadcast(unit);
  const auto differences = [&](Vec from) {
    return [x, units, from](int64_t i, int64_t left) {
      const Vec d = load_or(x + i, left, zero()) * units - from;
      return left >= kLanes ? d : first_or(d, int(left), zero());
    };
  };
  const float first = unit * x[0];
  const float mean = float(first + sum_terms(n, differences(broadcast(first))) / double(n));
  const auto from_mean = differences(broadcast(mean));
  const double rest = sum_terms(n, from_mean) / double(n);
  const double squares = sum_terms(n, [&](int64_t i, int64_t left) {
    const Vec d = from_mean(i, left);
    return d * d;
  });
  const double variance = squares / double(n) - rest * rest;
  return {mean, float(rest), variance < 0 ? 0 : variance};
}

// Rows whose squares overflow float32 are done again in this unit, 2^-84.
constexpr float kSmallUnit = 5.169878828456423e-26f;
// So are rows whose squares vanish, in 2^96: where the variance is below 2^-100 and eps does not outweigh it. Numbers
// of 2^20 and more that differ have a larger one.
constexpr float kLargeUnit = 7.922816251426434e28f, kLeastVariance = 7.888609052210118e-31f, kMostNarrow = 1048576.0f;

// The unit in which a row has its statistics well inside float32, judged by those in units of 1.
float unit_for(const Statistics& s, float eps) {
  if (!(s.variance < INFINITY)) return kSmallUnit;
  const bool vanishes = s.variance < kLeastVariance && eps < kLeastVariance;
  return vanishes && fabsf(s.mean) < kMostNarrow ? kLargeUnit : 1.0f;
}

}  // namespace

int layer_norm_rows(const QfRowsParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.columns;
  if (n == 0) return QF_OK;
  const bool in_place = p.dtype == QF_F32;
  float* scratch = in_place ? nullptr : static_cast<float*>(thread_scratch(size_t(n) * 3 * sizeof(float)));
  if (!in_place && !scratch) return QF_NO_MEMORY;
  const float* weight = p.weight ? floats_of(p.weight, 0, 0, p.dtype, n, scratch + n) : nullptr;
  const float* bias = p.bias ? floats_of(p.bias, 0, 0, p.dtype, n, scratch + 2 * n) : nullptr;
  for (int64_t row = begin; row < end; row++) {
    const float* x = floats_of(p.x, p.x_stride, row, p.dtype, n, scratch);
    Statistics s = statistics_of(x, n, 1.0f);
    const float unit = unit_for(s, p.eps);
    if (unit != 1.0f) s = statistics_of(x, n, unit);
    const double rstd = 1.0 / sqrt(s.variance + double(p.eps) * unit * unit);
    // NaN where the row is not finite, whatever its mean would be.
    if (p.mean) p.mean[row] = float((double(s.mean) + s.rest + s.variance * 0) / unit);
    if (p.rstd) p.rstd[row] = float(rstd * unit);
    const Vec units = broadcast(unit), mean = broadcast(s.mean), rest = broadcast(s.rest);
    const Vec factor = broadcast(float(rstd));
    char* out = row_of(p.out, p.out_stride, row, p.dtype);
    float* y = in_place ? reinterpret_cast<float*>(out) : scratch;
    for (int64_t i = 0; i < n; i += kLanes) {
      Vec z = ((load_or(x + i, n - i, zero()) * units - mean) - rest) * factor;
      if (weight) z = z * load_or(weight + i, n - i, zero());
      if (bias) z = z + load_or(bias + i, n - i, zero());
      store_some(y + i, z, n - i);
    }
    if (!in_place) store_row(out, y, p.dtype, int(n));
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
