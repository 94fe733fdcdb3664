// merge of rows: weights from the two lse, then a weighted sum.
#include <math.h>

#include "merge.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {
namespace {

constexpr int kPiece = 256;  // channels at a time, on the stack

// What a row and its counterpart are multiplied by, and their lse together. Both are weighed relative to the larger
// lse, so that neither overflows; the larger one's weight is 1 even where it is infinite.
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

// A row of weight 0 is not multiplied, for it may hold anything.
void add_weighted(float* sum, const float* x, float weight, int n) {
  if (weight == 0.0f) return;
  for (int i = 0; i < n; i++) sum[i] += weight * x[i];
}

}  // namespace

int merge_rows(const QfMergeParams& p, int64_t begin, int64_t end) {
  float x[kPiece], sum[kPiece];
  for (int64_t row = begin; row < end; row++) {
    const int64_t h = row % p.heads, t = row / p.heads % p.length, b = row / p.heads / p.length;
    const int64_t at = (b * p.heads + h) * p.length + t;
    const RowWeights weights(p.a_lse[b * p.a_lse_stride_b + h * p.a_lse_stride_h + t * p.a_lse_stride_t],
                             p.b_lse[b * p.b_lse_stride_b + h * p.b_lse_stride_h + t * p.b_lse_stride_t]);
    p.lse[at] = weights.lse;
    for (int d = 0; d < p.head_dim; d += kPiece) {
      const int n = p.head_dim - d < kPiece ? p.head_dim - d : kPiece;
      const auto piece = [&](const QfTensor& tensor, int32_t dtype) {
        return row_address(tensor, dtype, b, t, h) + d * element_bytes(dtype);
      };
      for (int i = 0; i < n; i++) sum[i] = 0.0f;
      load_row(x, piece(p.a, p.dtype), p.dtype, n);
      add_weighted(sum, x, weights.a, n);
      load_row(x, piece(p.b, p.b_dtype), p.b_dtype, n);
      add_weighted(sum, x, weights.b, n);
      store_row(piece(p.out, p.dtype), sum, p.dtype, n);
    }
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
