// Step 5 of int8.h for one row and one block of keys, in place: scores become weights.
#pragma once

#include "int8.h"
#include "int8_dots.h"

namespace qf {
namespace QF_ISA {

constexpr float kLowestTop = -3.4028234663852886e38f;

// State of one row from block to block.
struct Row {
  float slope;      // t = slope * u without softcap
  float cap_slope;  // q's scale * |scale|, used with softcap
  float bias;       // |scale| * (q . mean); computed when lse, sinks or softcap need it
  float top;
  KeyRange keys;  // the keys of this share that the row sees
  KeyRange seen;  // all keys the row sees
};

struct Softcap {
  float cap, inverse;  // cap 0: none
};

// 2^x for x <= 0, not below 2^-125: t = n + f with n an integer in the last bits of x + 1.5 * 2^23.
static inline Vec exp2_weight(Vec x) {
  const Vec bounded = vmax(broadcast(-125.0f), x);  // in this order a NaN stays one
  const Vec shift = broadcast(12582912.0f);
  const Vec shifted = bounded + shift;
  const Vec f = bounded - (shifted - shift);
  Vec p = broadcast(0.009570102207362652f);
  p = fma(p, f, broadcast(0.05591785907745361f));
  p = fma(p, f, broadcast(0.240247443318367f));
  p = fma(p, f, broadcast(0.6931217908859253f));
  p = fma(p, f, broadcast(0.9999992847442627f));
  return add_exponent(p, shifted);
}

// 2^(from - to) for integers from <= to; 0 when it would be below 2^-125.
static inline float power_between(float from, float to) {
  const float n = from - to;
  return n >= -125.0f ? __builtin_ldexpf(1.0f, int(n)) : 0.0f;  // NaN, of infinite scores, gives 0
}

static inline Vec capped(Vec u, const Row& row, const Softcap& softcap) {
  const Vec s = fma(u, broadcast(row.cap_slope), broadcast(row.bias));
  return tanh(s * broadcast(softcap.inverse)) * broadcast(softcap.cap * kLog2e);
}

// x where begin <= key < end, `other` elsewhere; keys count from the block's start.
static inline Vec where_seen(Vec key, float begin, float end, Vec x, Vec other) {
  return select_less(key, broadcast(begin), other, select_less(key, broadcast(end), x, other));
}

static inline Vec key_numbers() {
  alignas(64) float numbers[kLanes];
  for (int i = 0; i < kLanes; i++) numbers[i] = float(i);
  return load(numbers);
}

static inline void multiply(float* x, int n, float factor) {
  for (int i = 0; i < n; i += kLanes) store(x + i, load(x + i) * broadcast(factor));
}

// Raises row.top to cover the scores `high`, and rescales out[0, width) and total[0, kLanes).
static void raise_top(Row& row, Vec high, float* out, int width, float* total) {
  const float top = __builtin_ceilf(max(high));
  const float factor = power_between(row.top, top);
  row.top = top;
  multiply(out, width, factor);
  multiply(total, kLanes, factor);
}

// Turns the `keys` scores at `scores` into weights and adds them to total. With kMasked only keys [begin, end) count.
template <bool kMasked>
static inline void softmax_row(char* scores, const float* key_scales, int keys, float begin, float end,
                               const Softcap& softcap, Row& row, float* out, int width, float* total) {
  const Vec nothing = broadcast(-__builtin_inff()), lanes = key_numbers(), slope = broadcast(row.slope);
  Vec high[2] = {nothing, nothing};
  for (int i = 0; i < keys; i += 2 * kLanes)
    for (int half = 0; half < 2; half++) {
      const int j = i + half * kLanes;
      const Vec u = load_scores(scores + j * 4) * load(key_scales + j);
      Vec t = softcap.cap != 0.0f ? capped(u, row, softcap) : u * slope;
      store(reinterpret_cast<float*>(scores) + j, t);
      if (kMasked) t = where_seen(lanes + broadcast(float(j)), begin, end, t, nothing);
      high[half] = vmax(t, high[half]);  // in this order a NaN is ignored
    }
  const Vec highest = vmax(high[0], high[1]);
  if (any_greater(highest, broadcast(row.top))) raise_top(row, highest, out, width, total);

  const Vec top = broadcast(row.top);
  Vec sums[2] = {load(total), zero()};
  for (int i = 0; i < keys; i += 2 * kLanes) {
    Vec weight[2];
    for (int half = 0; half < 2; half++) {
      const int j = i + half * kLanes;
      weight[half] = exp2_weight(load(reinterpret_cast<const float*>(scores) + j) - top);
      if (kMasked) weight[half] = where_seen(lanes + broadcast(float(j)), begin, end, weight[half], zero());
      sums[half] = sums[half] + weight[half];
    }
    store_weights(scores, i, weight[0], weight[1]);
  }
  store(total, sums[0] + sums[1]);
}

}  // namespace QF_ISA
}  // namespace qf
