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

// A sum of many vectors, as accurate as one in double: the rounding errors of the additions are summed separately.
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
    double alls[4] = {}, rests[4] = {};  // four chains: the whole row waits for this sum
    for (int i = 0; i < kLanes; i += 4)
      for (int j = 0; j < 4; j++) alls[j] += sums[i + j], rests[j] += lost[i + j];
    const double all = (alls[0] + alls[1]) + (alls[2] + alls[3]), rest = (rests[0] + rests[1]) + (rests[2] + rests[3]);
    return rest - rest == 0 ? all + rest : all;  // an infinite sum has no meaningful rest
  }

 private:
  Vec sum_ = zero(), lost_ = zero();
};

// sums[s] = the sum over [0, n) of what term(i, left, terms) gives as terms[s], a Vec whose lanes from `left` on are 0.
template <int kSums, class Term>
static inline void sum_terms(int64_t n, Term term, double (&sums)[kSums]) {
  LongSum totals[kSums];
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = begin + kChunk < n ? begin + kChunk : n;
    Vec chunk[kSums], terms[kSums];
    for (int s = 0; s < kSums; s++) chunk[s] = zero();
    for (int64_t i = begin; i < end; i += kLanes) {
      term(i, end - i, terms);
      for (int s = 0; s < kSums; s++) chunk[s] = chunk[s] + terms[s];
    }
    for (int s = 0; s < kSums; s++) totals[s].add(chunk[s]);
  }
  for (int s = 0; s < kSums; s++) sums[s] = totals[s].total();
}

// The sum over [0, n) of term(i, left).
template <class Term>
static inline double sum_terms(int64_t n, Term term) {
  double sums[1];
  sum_terms(n, [&](int64_t i, int64_t left, Vec* terms) { terms[0] = term(i, left); }, sums);
  return sums[0];
}

// The largest of factor * x; NaN is ignored.
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
