// merge of rows: weights from the two lse, then a weighted sum.
#include <math.h>

#include "merge.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {
namespace {

// The factors of a row and its counterpart, and their joint lse. Both are relative to the larger lse, so that neither
// overflows; the larger one's weight is 1 even where it is infinite.
struct RowWeights {
  float a, b, lse;

  RowWeights(float a_lse, float b_lse) {
    const float top = a_lse > b_lse ? a_lse : b_lse;  // NaN in either reaches the sum through its weight
    a = a_lse == top ? 1.0f : expf(a_lse - top);
    b = b_lse == top ? 1.0f : expf(b_lse - top);
    const float sum = a + b;
    lse = top + logf(sum);
    a /= sum, b /= sum;
    if (b_lse == -INFINITY) a = 1.0f, b = 0.0f, lse = a_lse;
    if (a_lse == -INFINITY) a = 0.0f, b = b_lse == -INFINITY ? 0.0f : 1.0f, lse = b_lse;
  }
};

// A row of weight 0 is not read, for it may hold anything.
template <class A, class B>
void merge_row(A of_a, B of_b, const void* a, const void* b, const RowWeights& weights, int n, void* out) {
  const Vec factor_a = broadcast(weights.a), factor_b = broadcast(weights.b);
  for (int d = 0; d < n; d += kLanes) {
    Vec sum = zero();
    if (weights.a != 0.0f) sum = fma(factor_a, of_a.load(a, d, n - d), sum);
    if (weights.b != 0.0f) sum = fma(factor_b, of_b.load(b, d, n - d), sum);
    of_a.store(out, d, sum, n - d);
  }
}

}  // namespace

int merge_rows(const QfMergeParams& p, int64_t begin, int64_t end) {
  return with_numbers(p.dtype, [&](auto of_a) {
    return with_numbers(p.b_dtype, [&](auto of_b) {
      for (int64_t row = begin; row < end; row++) {
        const int64_t h = row % p.heads, t = row / p.heads % p.length, b = row / p.heads / p.length;
        const RowWeights weights(p.a_lse[b * p.a_lse_stride_b + h * p.a_lse_stride_h + t * p.a_lse_stride_t],
                                 p.b_lse[b * p.b_lse_stride_b + h * p.b_lse_stride_h + t * p.b_lse_stride_t]);
        p.lse[(b * p.heads + h) * p.length + t] = weights.lse;
        merge_row(of_a, of_b, row_address(p.a, p.dtype, b, t, h), row_address(p.b, p.b_dtype, b, t, h), weights,
                  p.head_dim, row_address(p.out, p.dtype, b, t, h));
      }
      return int(QF_OK);
    });
  });
}

}  // namespace QF_ISA
}  // namespace qf
