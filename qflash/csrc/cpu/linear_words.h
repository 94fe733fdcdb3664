// Numbers of x and w as the product of a linear layer reads them: words of four bytes, each a float32 or as many
// narrower numbers of consecutive k as fit. A kind of words defines how memory becomes kLanes of them, and how two are
// multiplied. What does not exist is zero.
//
//   along(p, n)           consecutive words of memory that runs along k, where n numbers are left
//   across(p, s, k, n)    one word for each of kLanes neighbours, of which n exist; consecutive k, of which k are left,
//                         lie s numbers apart
//   dot(a, b, sum)        sum + a b
#pragma once

#include "qflash.h"
#include "vec.h"

namespace qf {
namespace QF_ISA {

struct F32Words {
  using Number = float;
  static constexpr int kPack = 1;
  static Vec along(const Number* p, int n) { return n >= kLanes ? load(p) : load_part(p, n); }
  static Vec across(const Number* p, int64_t, int, int n) { return along(p, n); }
  static Vec dot(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};

// 16-bit numbers, made float32.
template <Vec (*kLoad)(const uint16_t*)>
struct WidenedWords {
  using Number = uint16_t;
  static constexpr int kPack = 1;
  static Vec along(const Number* p, int n) {
    if (n >= kLanes) return kLoad(p);
    Number part[kLanes] = {};
    for (int i = 0; i < n; i++) part[i] = p[i];
    return kLoad(part);
  }
  static Vec across(const Number* p, int64_t, int, int n) { return along(p, n); }
  static Vec dot(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }
};
using F16Words = WidenedWords<load_f16>;
using BF16Words = WidenedWords<load_bf16>;

#if defined(__AVX512BF16__)
// Two bfloat16 without conversion: vdpbf16ps multiplies both pairs and adds.
struct BF16Pairs {
  using Number = uint16_t;
  static constexpr int kPack = 2;
  static Vec along(const Number* p, int n) {
    if (n >= 2 * kLanes) return _mm512_loadu_ps(p);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((__mmask32(1) << n) - 1, p));
  }
  static Vec across(const Number* p, int64_t stride, int k, int n) {
    const __mmask16 there = n >= kLanes ? ~__mmask16(0) : first_lanes(n);
    const __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p));
    if (k < 2) return _mm512_castsi512_ps(even);
    const __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p + stride));
    return _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
  }
  static Vec dot(Vec a, Vec b, Vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

}  // namespace QF_ISA
}  // namespace qf
