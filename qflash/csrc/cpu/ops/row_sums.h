// What the row kernels share: rows as float32, sums whose rounding does not grow with the row, weights of a softmax.
#pragma once

#include <float.h>
#include <math.h>

#include "row_ops.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {

constexpr int64_t kChunk = 16 * kLanes;  // elements that are summed in float32 before rounding errors are kept

static inline char* row_of(const void* matrix, int64_t stride, int64_t row, int32_t dtype) {
  return const_cast<char*>(static_cast<const char*>(matrix)) + row * stride * element_bytes(dtype);
}

// Row `row` as floats: in place, or converted into `scratch`.
static inline const float* floats_of(const void* matrix, int64_t stride, int64_t row, int32_t dtype, int64_t columns,
                                     float* scratch) {
  const char* start = row_of(matrix, stride, row, dtype);
  if (dtype == QF_F32) return reinterpret_cast<const float*>(start);
  load_row(scratch, start, dtype, int(columns));
  return scratch;
}

// x[0, kLanes), `rest` from `left` on.
static inline Vec load_or(const float* x, int64_t left, Vec rest) {
  return left >= kLanes ? load(x) : first_or(load_part(x, int(left)), int(left), rest);
}
static inline void store_some(float* x, Vec value, int64_t left) {
  if (left >= kLanes)
    store(x, value);
  else
    store_part(x, value, int(left));
}

// A sum of many vectors that is as good as one in double: what each addition rounds off is summed apart.
class LongSum {
 public:
  void add(Vec x) {
    const Vec next = sum_ + x, part = next - sum_;
    lost_ = lost_ + ((sum_ - (next - part)) + (x - part));
    sum_ = next;
  }
  double total() const {
    float sums[kLanes], lost[kLanes];
    store(sums, sum_);
    store(lost, lost_);
    double all = 0, rest = 0;
    for (int i = 0; i < kLanes; i++) all += sums[i], rest += lost[i];
    return rest - rest == 0 ? all + rest : all;  // an infinite sum has lost nothing that can be told
  }

 private:
  Vec sum_ = zero(), lost_ = zero();
};

// The sum over [0, n) of term(i, left), a Vec whose lanes from `left` on are 0.
template <class Term>
static inline double sum_terms(int64_t n, Term term) {
  LongSum total;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = begin + kChunk < n ? begin + kChunk : n;
    Vec sums = zero();
    for (int64_t i = begin; i < end; i += kLanes) sums = sums + term(i, end - i);
    total.add(sums);
  }
  return total.total();
}

// The greatest of factor * x; NaN is passed by.
static inline float largest_of(const float* x, int64_t n, float factor) {
  const Vec least = broadcast(-INFINITY), factors = broadcast(factor);
  Vec m = least;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec scores = load_or(x + i, n - i, zero()) * factors;
    m = vmax(n - i >= kLanes ? scores : first_or(scores, int(n - i), least), m);
  }
  return max(m);
}

// exp(scale (x - m)) for x <= m.
struct Weights {
  Vec m, factor, lowest;

  Weights(float largest, float scale) : m(broadcast(largest)) {
    const float f = scale * kLog2e < FLT_MAX ? scale * kLog2e : FLT_MAX;
    factor = broadcast(f);
    lowest = broadcast(-126.0f / f > -FLT_MAX ? -126.0f / f : -FLT_MAX);
  }
  Vec operator()(Vec x) const { return exp2_nonpositive(x - m, factor, lowest); }
};

}  // namespace QF_ISA
}  // namespace qf
