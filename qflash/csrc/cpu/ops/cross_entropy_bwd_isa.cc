// The gradient of cross_entropy, row by row: (w + dlse) p - w ((1 - s) [j = target] + s / n), with p = exp(logit -
// lse).
#include "memory.h"
#include "row_gradients.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {

int cross_entropy_bwd_rows(const QfCrossEntropyBwdParams& p, int64_t begin, int64_t end, float share) {
  const int64_t n = p.columns;
  const bool in_place = p.dtype == QF_F32;
  float* scratch = in_place ? nullptr : static_cast<float*>(thread_scratch(size_t(n) * sizeof(float)));
  if (!in_place && !scratch) return QF_NO_MEMORY;
  for (int64_t row = begin; row < end; row++) {
    char* dlogits = row_of(p.dlogits, p.dlogits_stride, row, p.dtype);
    const int32_t target = p.targets[row];
    const bool ignored = target == p.ignore_index;
    if (ignored && !p.dlse) {
      memset(dlogits, 0, size_t(n * element_bytes(p.dtype)));  // zero is all bits zero in every dtype
      continue;
    }
    const float w = ignored ? 0.0f : p.dlosses[row] + share;
    const Vec factor = broadcast(p.dlse ? w + p.dlse[row] : w);
    const Vec spread = broadcast(w * p.label_smoothing / float(n));
    const float* x = floats_of(p.logits, p.logits_stride, row, p.dtype, n, scratch);
    float* y = in_place ? reinterpret_cast<float*>(dlogits) : scratch;
    const Weights weigh(p.lse[row], 1.0f);
    for (int64_t i = 0; i < n; i += kLanes)
      store_some(y + i, factor * weigh(load_or(x + i, n - i, zero())) - spread, n - i);
    if (!ignored) y[target] -= w * (1.0f - p.label_smoothing);
    if (!in_place) store_row(dlogits, y, p.dtype, int(n));
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
