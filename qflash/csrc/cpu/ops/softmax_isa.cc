// softmax of rows: the maximum, the weights and their sum, the quotients.
#include "memory.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {

namespace {

// scale x = scale * factor * x with scale >= 0. A negative scale changes the sign of x; where it is 0, x becomes 0, or
// NaN if it was nonfinite; where it is so small that a difference past the largest float would still count, x is
// halved.
struct SplitScale {
  float factor, scale;

  explicit SplitScale(float given) : factor(fabsf(given) < 0x1p-100f ? 0.5f : 1.0f), scale(fabsf(given) / factor) {
    if (given < 0.0f) factor = -factor;
    if (given == 0.0f) factor = 0.0f, scale = 1.0f;
  }
};

}  // namespace

int softmax_rows(const QfRowsParams& p, int64_t begin, int64_t end) {
  const bool in_place = p.dtype == QF_F32;  // out holds the weights meanwhile
  float* scratch = in_place ? nullptr : static_cast<float*>(thread_scratch(size_t(p.columns) * sizeof(float)));
  if (!in_place && !scratch) return QF_NO_MEMORY;
  const SplitScale split(p.scale);
  for (int64_t row = begin; row < end; row++) {
    const float* x = floats_of(p.x, p.x_stride, row, p.dtype, p.columns, scratch);
    char* out = row_of(p.out, p.out_stride, row, p.dtype);
    float* weights = in_place ? reinterpret_cast<float*>(out) : scratch;
    const Weights weigh(largest_of(x, p.columns, split.factor), split.scale);
    const double l = sum_terms(p.columns, [&](int64_t i, int64_t left) {
      const Vec weight = weigh(load_or(x + i, left, zero()) * broadcast(split.factor));
      store_some(weights + i, weight, left);
      return left >= kLanes ? weight : first_or(weight, int(left), zero());
    });
    const Vec inverse = broadcast(float(1.0 / l));
    for (int64_t i = 0; i < p.columns; i += kLanes)
      store_some(weights + i, load_or(weights + i, p.columns - i, zero()) * inverse, p.columns - i);
    if (!in_place) store_row(out, weights, p.dtype, int(p.columns));
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
