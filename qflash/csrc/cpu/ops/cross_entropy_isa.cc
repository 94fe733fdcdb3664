// cross_entropy of rows: with lse = m + ln l, the loss is ln l + (1 - s) (m - logit) + s (m - mean).
#include "memory.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {
namespace {

// In units in which a chunk of the largest floats does not overflow.
double mean_of(const float* x, int64_t n) {
  constexpr float kUnit = 1.0f / 1024;
  const Vec units = broadcast(kUnit);
  return sum_terms(n, [&](int64_t i, int64_t left) { return load_or(x + i, left, zero()) * units; }) /
         (n * double(kUnit));
}

}  // namespace

int cross_entropy_rows(const QfCrossEntropyParams& p, int64_t begin, int64_t end) {
  float* scratch = nullptr;
  if (p.dtype != QF_F32) {
    scratch = static_cast<float*>(thread_scratch(size_t(p.columns) * sizeof(float)));
    if (!scratch) return QF_NO_MEMORY;
  }
  for (int64_t row = begin; row < end; row++) {
    const int32_t target = p.targets[row];
    const bool ignored = target == p.ignore_index;
    p.losses[row] = 0.0f;
    if (ignored && !p.lse) continue;
    const float* x = floats_of(p.logits, p.logits_stride, row, p.dtype, p.columns, scratch);
    const float m = largest_of(x, p.columns, 1.0f);
    const Weights weigh(m, 1.0f);
    const double l = sum_terms(p.columns, [&](int64_t i, int64_t left) {
      const Vec weight = weigh(load_or(x + i, left, zero()));
      return left >= kLanes ? weight : first_or(weight, int(left), zero());
    });
    const double ln_sum = log(l);
    if (p.lse) p.lse[row] = float(m + ln_sum);
    if (ignored) continue;
    double loss = ln_sum + (1.0 - p.label_smoothing) * (double(m) - x[target]);
    if (p.label_smoothing != 0.0f) loss += p.label_smoothing * (m - mean_of(x, p.columns));
    p.losses[row] = float(loss);
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
