// One float vector and its operations, so that every kernel source compiles unchanged for each instruction set.
//
// QF_ISA names the namespace (avx512, avx2 or generic) and is set per object library; everything here lives in
// qf::QF_ISA with internal linkage, because two objects compiled for different machines must never share a copy of
// an inline function. For the same reason these sources use no standard templates.
//
//   lanes          avx512 16, avx2 8, generic 4 (plain vector extensions, any machine)
//   + - * / unary- arithmetic without comparisons works on Vec directly
//   *_part         n in [0, kLanes]: lanes >= n load as zero and are not stored; memory past n is not touched
//   vmax, vmin     return the SECOND operand when either is NaN
//   exp2_*, exp    about 1 ulp; -inf gives 0, NaN gives NaN, overflow gives +inf, results below 2^-126 become 0,
//                  so no denormal reaches the multiplies that follow
//   load_f16, ...  kLanes half-precision numbers from or to memory, rounded to nearest even
//   load_i8        kLanes integers of 8 bits
#pragma once

#include <stdint.h>
#include <string.h>

#ifndef QF_ISA
#error "QF_ISA must name this object's instruction set"
#endif

#if defined(__AVX512F__)
#include "vec_avx512.h"
#elif defined(__AVX2__)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
#endif

namespace qf {
namespace QF_ISA {

constexpr float kLog2e = 1.44269502162933349609375f;
constexpr float kLn2 = 0.693147182464599609375f;

// 2^r for |r| <= 1/2; exactly 1 at 0. Relative error of the polynomial: 2e-9.
static inline Vec exp2_fraction(Vec r) {
  Vec p = broadcast(0.00015353361959569156f);
  p = fma(p, r, broadcast(0.0013398873852565885f));
  p = fma(p, r, broadcast(0.00961843691766262f));
  p = fma(p, r, broadcast(0.055503323674201965f));
  p = fma(p, r, broadcast(0.24022647738456726f));
  p = fma(p, r, broadcast(0.6931471824645996f));
  return fma(p, r, broadcast(1.0f));
}

// 2^(x * factor) for x * factor <= 0, which is all that softmax needs; 0 where x < lowest = -126 / factor. Rounding by
// adding 1.5 * 2^23 folds the product into both steps of the reduction. Polynomial: 9e-8.
static inline Vec exp2_nonpositive(Vec x, Vec factor, Vec lowest) {
  const Vec shift = broadcast(12582912.0f);
  const Vec bounded = vmax(lowest, x);  // bound first: vmax passes a NaN in x through
  const Vec n = fma(bounded, factor, shift) - shift;
  const Vec r = fma(bounded, factor, -n);
  Vec p = broadcast(0.001326472731307149f);
  p = fma(p, r, broadcast(0.009671512991189957f));
  p = fma(p, r, broadcast(0.05550733581185341f));
  p = fma(p, r, broadcast(0.24022242426872253f));
  p = fma(p, r, broadcast(0.6931470036506653f));
  p = fma(p, r, broadcast(1.0f));
  return zero_where_less(x, lowest, scale_by_small_power(p, n));
}

// 2^x for x <= 0, or above by no more than rounding: adding to the exponent does not handle overflow.
static inline Vec exp2_nonpositive(Vec x) {
  const Vec lowest = broadcast(-126.0f);
  const Vec bounded = vmax(lowest, x);
  const Vec n = round_nearest(bounded);
  return zero_where_less(x, lowest, scale_by_small_power(exp2_fraction(bounded - n), n));
}

// n * ln 2 is subtracted in two pieces, the first so short that its product is exact, with or without an fma.
static inline Vec exp(Vec x) {
  const Vec lowest = broadcast(-87.33654f);  // ln 2^-126
  const Vec bounded = vmin(broadcast(89.5f), vmax(lowest, x));
  const Vec n = round_nearest(bounded * broadcast(kLog2e));
  const Vec rest = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), bounded));
  return zero_where_less(x, lowest, scale_by_power(exp2_fraction(rest * broadcast(kLog2e)), n));
}

#if !defined(__AVX512F__)
// rows[i][j] <-> rows[j][i] for kLanes rows: interleaving the two halves log2(kLanes) times. Unrolled,
// because only constant indices keep the rows in registers.
static inline __attribute__((always_inline)) void transpose(Vec* rows) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    Vec mixed[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; i++) {
      mixed[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      mixed[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) rows[i] = mixed[i];
  }
}
#endif

// Lane i is the sum of rows[i], for kLanes rows.
static inline __attribute__((always_inline)) Vec sum_rows(Vec* rows) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2)
#pragma GCC unroll 16
    for (int i = 0; i < half; i++)
      rows[i] = interleave_low(rows[i], rows[i + half]) + interleave_high(rows[i], rows[i + half]);
  return rows[0];
}

// tanh: an odd polynomial near zero, where 1 - e^-2|x| would cancel, and the quotient of exponentials beyond.
static inline Vec tanh(Vec x) {
  const Vec magnitude = vmax(x, -x);
  const Vec z = x * x;
  Vec p = broadcast(-0.005704933777451515f);
  p = fma(p, z, broadcast(0.02063904143869877f));
  p = fma(p, z, broadcast(-0.053739700466394424f));
  p = fma(p, z, broadcast(0.13331441581249237f));
  p = fma(p, z, broadcast(-0.3333328068256378f));
  const Vec near_zero = fma(x * z, p, x);
  const Vec e = exp(magnitude * broadcast(-2.0f));
  const Vec beyond = copy_sign((broadcast(1.0f) - e) / (broadcast(1.0f) + e), x);
  return select_less(magnitude, broadcast(0.625f), near_zero, beyond);
}

// The slope of tanh, 4 e / (1 + e)^2 with e = e^-2|x|: 1 - tanh^2 would be only rounding error where tanh nears 1.
static inline Vec tanh_slope(Vec x) {
  const Vec e = exp(vmax(x, -x) * broadcast(-2.0f)), sum = broadcast(1.0f) + e;
  return broadcast(4.0f) * e / (sum * sum);
}

}  // namespace QF_ISA
}  // namespace qf
