// Gradients of layer_norm. With z = (x - mean) rstd and g = dout weight,
//   dx = rstd (g - rowmean(g) - z rowmean(g z)) + dmean / n - z drstd rstd^2 / n,
// and the sums of dout z and of dout over the given rows, which become dweight and dbias.
//
// The mean is what the forward pass rounded to a float, so z is off by one number for the whole row. That number is z's
// own mean, which should be 0, and is subtracted: an offset of the row costs no accuracy here either.
#include "memory.h"
#include "row_gradients.h"
#include "row_sums.h"

namespace qf {
namespace QF_ISA {
namespace {

// A row's z, from the rounded mean. Halves are subtracted, because the difference of two floats may overflow.
struct Normalised {
  const float* x;
  Vec half_mean, twice_rstd;

  Normalised(const float* x, float mean, float rstd)
      : x(x), half_mean(broadcast(0.5f * mean)), twice_rstd(broadcast(2.0f * rstd)) {}
  // 0 from `left` on.
  Vec operator()(int64_t i, int64_t left) const {
    const Vec z = (load_or(x + i, left, zero()) * broadcast(0.5f) - half_mean) * twice_rstd;
    return left >= kLanes ? z : first_or(z, int(left), zero());
  }
};

void add_to(float* sums, Vec x, int64_t left) { store_some(sums, load_or(sums, left, zero()) + x, left); }

}  // namespace

int layer_norm_bwd_rows(const QfLayerNormBwdParams& p, int64_t begin, int64_t end, float* sums) {
  const int64_t n = p.columns;
  const bool in_place = p.dtype == QF_F32;
  float* scratch = in_place ? nullptr : static_cast<float*>(thread_scratch(size_t(n) * 3 * sizeof(float)));
  if (!in_place && !scratch) return QF_NO_MEMORY;
  const float* weight = p.weight ? floats_of(p.weight, 0, 0, p.dtype, n, scratch + 2 * n) : nullptr;
  if (sums) memset(sums, 0, size_t(n) * 2 * sizeof(float));
  for (int64_t row = begin; row < end; row++) {
    const float* x = floats_of(p.x, p.x_stride, row, p.dtype, n, scratch);
    const float* dout = floats_of(p.dout, p.dout_stride, row, p.dtype, n, scratch + n);
    const float rstd = p.rstd[row];
    const Normalised z_of(x, p.mean[row], rstd);
    const auto g_of = [&](int64_t i, int64_t left) {
      const Vec g = load_or(dout + i, left, zero());
      return weight ? g * load_or(weight + i, left, zero()) : g;
    };
    double of_row[3];  // the sums of z, g and g z
    sum_terms(
        n,
        [&](int64_t i, int64_t left, Vec* terms) {
          terms[0] = z_of(i, left), terms[1] = g_of(i, left), terms[2] = terms[1] * terms[0];
        },
        of_row);
    const double offset = of_row[0] / double(n), mean_g = of_row[1] / double(n);
    // With an infinite gradient the correction, which may be 0 * inf, is left out.
    const double correction = mean_g - mean_g == 0 ? offset * mean_g : 0.0;
    const double mean_gz = of_row[2] / double(n) - correction;
    const double of_rstd = p.drstd ? double(p.drstd[row]) * rstd / double(n) : 0.0;
    const Vec off = broadcast(float(offset)), a = broadcast(float(mean_g)), b = broadcast(float(mean_gz + of_rstd));
    const Vec factor = broadcast(rstd), of_mean = broadcast(p.dmean ? float(p.dmean[row] / double(n)) : 0.0f);
    char* dx = row_of(p.dx, p.dx_stride, row, p.dtype);
    float* y = in_place ? reinterpret_cast<float*>(dx) : scratch;
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t left = n - i;
      const Vec z = z_of(i, left) - off, g = g_of(i, left);
      if (sums) {
        const Vec of_out = load_or(dout + i, left, zero());
        add_to(sums + i, of_out * z, left);
        add_to(sums + n + i, of_out, left);
      }
      store_some(y + i, factor * ((g - a) - z * b) + of_mean, left);
    }
    if (!in_place) store_row(dx, y, p.dtype, int(n));
  }
  return QF_OK;
}

void layer_norm_bwd_columns(const QfLayerNormBwdParams& p, const float* sums, int64_t count, int64_t begin,
                            int64_t end) {
  constexpr int kStrip = 256;
  void* const results[2] = {p.dweight, p.dbias};
  for (int which = 0; which < 2; which++) {
    if (!results[which]) continue;
    for (int64_t first = begin; first < end; first += kStrip) {
      const int columns = int(first + kStrip < end ? kStrip : end - first);
      double totals[kStrip] = {};
      for (int64_t part = 0; part < count; part++) {
        const float* from = sums + (2 * part + which) * p.columns + first;
        for (int i = 0; i < columns; i++) totals[i] += from[i];
      }
      float rounded[kStrip];
      for (int i = 0; i < columns; i++) rounded[i] = float(totals[i]);
      char* to = static_cast<char*>(results[which]) + first * element_bytes(p.dtype);
      store_row(to, rounded, p.dtype, columns);
    }
  }
}

}  // namespace QF_ISA
}  // namespace qf
