// The gradient of softmax, row by row: dx = scale out (dout - rowsum(out dout)).
#include "memory.h"
#include "row_gradients.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {

int softmax_bwd_rows(const QfSoftmaxBwdParams& p, int64_t begin, int64_t end) {
  const int64_t n = p.columns;
  const bool in_place = p.dtype == QF_F32;
  float* scratch = in_place ? nullptr : static_cast<float*>(thread_scratch(size_t(n) * 2 * sizeof(float)));
  if (!in_place && !scratch) return QF_NO_MEMORY;
  const Vec scale = broadcast(p.scale);
  for (int64_t row = begin; row < end; row++) {
    const float* out = floats_of(p.out, p.out_stride, row, p.dtype, n, scratch);
    const float* dout = floats_of(p.dout, p.dout_stride, row, p.dtype, n, scratch + n);
    const double sum = sum_terms(
        n, [&](int64_t i, int64_t left) { return load_or(out + i, left, zero()) * load_or(dout + i, left, zero()); });
    const Vec delta = broadcast(float(sum));
    char* dx = row_of(p.dx, p.dx_stride, row, p.dtype);
    float* y = in_place ? reinterpret_cast<float*>(dx) : scratch;
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec weight = load_or(out + i, n - i, zero());
      store_some(y + i, weight * (load_or(dout + i, n - i, zero()) - delta) * scale, n - i);
    }
    if (!in_place) store_row(dx, y, p.dtype, int(n));
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
