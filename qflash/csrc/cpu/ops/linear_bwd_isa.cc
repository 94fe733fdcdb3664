// Gradients of the activations of linear layers, and sums over rows: compiled once for each instruction set.
#include "activation.h"
#include "linear_bwd.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {
namespace {

// h <- dout activation'(h) and, with SwiGLU, u <- dout silu(h).
struct Differentiate {
  const float* dout;
  float *h, *u;
  int count;

  template <int kActivation>
  void run() const {
    for (int c = 0; c < count; c += kLanes) {
      const Slopes by = slopes<kActivation>(load(h + c), kActivation == QF_SWIGLU ? load(u + c) : zero());
      store(h + c, load(dout + c) * by.of_h);
      if (kActivation == QF_SWIGLU) store(u + c, load(dout + c) * by.of_u);
    }
  }
};

// Element `index` of an array of `dtype`.
const char* at(const void* array, int64_t index, int32_t dtype) {
  return static_cast<const char*>(array) + index * element_bytes(dtype);
}
char* at(void* array, int64_t index, int32_t dtype) { return static_cast<char*>(array) + index * element_bytes(dtype); }

// row[0, count) goes to `to` in `dtype`; what is stored there is added to `sums`.
void store_and_sum(float* row, int32_t dtype, int count, void* to, float* sums) {
  store_row(to, row, dtype, count);
  if (!sums) return;
  load_row(row, to, dtype, count);
  for (int c = 0; c < count; c += kLanes) store(sums + c, load(sums + c) + load(row + c));
}

}  // namespace

void linear_bwd_strip(const QfLinearBwdParams& p, const Strip& strip, const ProductGradients& gradients,
                      float* const* sums) {
  const int count = strip.columns;
  float dout[kStripColumns] = {}, h[kStripColumns] = {}, u[kStripColumns] = {}, totals[2][kStripColumns] = {};
  for (int r = 0; r < strip.rows; r++) {
    const int64_t row = strip.row + r, place = row * p.n + strip.column;
    const char* from = at(p.dout, row * p.dout_stride_m + strip.column, p.dtype);
    if (p.dresidual) memcpy(at(p.dresidual, place, p.dtype), from, size_t(count) * element_bytes(p.dtype));
    load_row(dout, from, p.dtype, count);
    if (p.activation == QF_IDENTITY) {
      for (int c = 0; c < count; c += kLanes) store(totals[0] + c, load(totals[0] + c) + load(dout + c));
      continue;
    }
    load_row(h, at(p.pre, place, p.dtype), p.dtype, count);
    if (gradients.du) load_row(u, at(p.pre_up, place, p.dtype), p.dtype, count);
    with_activation(p.activation, Differentiate{dout, h, u, count});
    store_and_sum(h, p.dtype, count, at(gradients.dh, place, p.dtype), sums[0] ? totals[0] : nullptr);
    if (gradients.du) store_and_sum(u, p.dtype, count, at(gradients.du, place, p.dtype), sums[1] ? totals[1] : nullptr);
  }
  for (int i = 0; i < 2; i++)
    if (sums[i]) memcpy(sums[i], totals[i], size_t(count) * 4);
}

void linear_bwd_bias(const float* sums, int64_t parts, int64_t n, int64_t column, int columns, int32_t dtype,
                     void* bias) {
  double totals[kStripColumns] = {};
  float rounded[kStripColumns];
  for (int64_t part = 0; part < parts; part++)
    for (int c = 0; c < columns; c++) totals[c] += sums[part * n + column + c];
  for (int c = 0; c < columns; c++) rounded[c] = float(totals[c]);
  store_row(at(bias, column, dtype), rounded, dtype, columns);
}

}  // namespace QF_ISA
}  // namespace qf
