// The gradient of softmax, row by row: dx = scale out (dout - rowsum(out dout)).
#include "row_gradients.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {

int softmax_bwd_rows(const QfSoftmaxBwdParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.columns;
  const Vec scale = broadcast(p.scale);
  return with_numbers(p.dtype, [&](auto numbers) {
    for (int64_t row = begin; row < end; row++) {
      const char* out = row_of(p.out, p.out_stride, row, p.dtype);
      const char* dout = row_of(p.dout, p.dout_stride, row, p.dtype);
      char* dx = row_of(p.dx, p.dx_stride, row, p.dtype);
      const double sum = sum_terms(
          n, [&](int64_t i, int64_t left) { return numbers.load(out, i, left) * numbers.load(dout, i, left); });
      const Vec delta = broadcast(float(sum));
      for (int64_t i = 0; i < n; i += kLanes) {
        const Vec weight = numbers.load(out, i, n - i);
        numbers.store(dx, i, weight * (numbers.load(dout, i, n - i) - delta) * scale, n - i);
      }
    }
    return int(QF_OK);
  });
}

}  // namespace QF_ISA
}  // namespace qf
