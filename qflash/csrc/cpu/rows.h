// Rows of q, k, v and out between memory of any dtype and float32 scratch, with the rotary embedding.
#pragma once

#include "qflash.h"
#include "sequence.h"
#include "vec.h"

namespace qf {
namespace QF_ISA {

static inline int64_t element_bytes(int32_t dtype) { return dtype == QF_F32 ? 4 : 2; }

// Row `row` (counted from the tensor's start when packed) of head `head`.
static inline char* row_address(const QfTensor& t, int32_t dtype, int64_t batch, int64_t row, int64_t head) {
  return static_cast<char*>(t.data) + offset_of(t, batch, row, head) * element_bytes(dtype);
}

// destination[0, n) = source[0, n) of type `dtype`.
static inline void load_row(float* destination, const void* source, int32_t dtype, int n) {
  if (dtype == QF_F32) {
    memcpy(destination, source, size_t(n) * 4);
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(source);
  int i = 0;
  if (dtype == QF_F16) {
    for (; i + kLanes <= n; i += kLanes) store(destination + i, load_f16(halves + i));
  } else {
    for (; i + kLanes <= n; i += kLanes) store(destination + i, load_bf16(halves + i));
  }
  if (i < n) {
    uint16_t rest[kLanes] = {};
    for (int j = i; j < n; j++) rest[j - i] = halves[j];
    store_part(destination + i, dtype == QF_F16 ? load_f16(rest) : load_bf16(rest), n - i);
  }
}

// Numbers of one dtype in memory, a vector of them at a time: elements [i, i + kLanes) of an array, of which `left`
// exist. What does not exist is loaded as zero and not stored.
template <int32_t kDtype>
struct Numbers {
  static constexpr int kBytes = kDtype == QF_F32 ? 4 : 2;

  static __attribute__((always_inline)) Vec load(const void* array, int64_t i, int64_t left) {
    const char* from = static_cast<const char*>(array) + i * kBytes;
    if (left >= kLanes) return load_whole(from);
    if constexpr (kDtype == QF_F32) return load_part(reinterpret_cast<const float*>(from), int(left));
    return load_rest(from, int(left));
  }
  static __attribute__((always_inline)) void store(void* array, int64_t i, Vec x, int64_t left) {
    char* to = static_cast<char*>(array) + i * kBytes;
    if (left >= kLanes) return store_whole(to, x);
    if constexpr (kDtype == QF_F32) return store_part(reinterpret_cast<float*>(to), x, int(left));
    store_rest(to, x, int(left));
  }

 private:
  static __attribute__((always_inline)) Vec load_whole(const void* from) {
    if constexpr (kDtype == QF_F32) return QF_ISA::load(static_cast<const float*>(from));
    if constexpr (kDtype == QF_F16) return load_f16(static_cast<const uint16_t*>(from));
    if constexpr (kDtype == QF_BF16) return load_bf16(static_cast<const uint16_t*>(from));
  }
  static __attribute__((always_inline)) void store_whole(void* to, Vec x) {
    if constexpr (kDtype == QF_F32) QF_ISA::store(static_cast<float*>(to), x);
    if constexpr (kDtype == QF_F16) store_f16(static_cast<uint16_t*>(to), x);
    if constexpr (kDtype == QF_BF16) store_bf16(static_cast<uint16_t*>(to), x);
  }
  static __attribute__((noinline)) Vec load_rest(const void* from, int n) {
    char part[kLanes * kBytes] = {};
    memcpy(part, from, size_t(n * kBytes));
    return load_whole(part);
  }
  static __attribute__((noinline)) void store_rest(void* to, Vec x, int n) {
    char part[kLanes * kBytes];
    store_whole(part, x);
    memcpy(to, part, size_t(n * kBytes));
  }
};

// run(Numbers of `dtype`).
template <class Run>
static inline auto with_numbers(int32_t dtype, Run run) {
  if (dtype == QF_F32) return run(Numbers<QF_F32>());
  if (dtype == QF_F16) return run(Numbers<QF_F16>());
  return run(Numbers<QF_BF16>());
}

// destination[0, n) = scale * source[0, n), n in whole vectors.
static inline void load_scaled(float* destination, const int8_t* source, float scale, int n) {
  for (int i = 0; i < n; i += kLanes) store(destination + i, broadcast(scale) * load_i8(source + i));
}

// destination[0, n) of type `dtype` = source[0, n), rounded to nearest even.
static inline void store_row(void* destination, const float* source, int32_t dtype, int n) {
  if (dtype == QF_F32) {
    memcpy(destination, source, size_t(n) * 4);
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(destination);
  int i = 0;
  if (dtype == QF_F16) {
    for (; i + kLanes <= n; i += kLanes) store_f16(halves + i, load(source + i));
  } else {
    for (; i + kLanes <= n; i += kLanes) store_bf16(halves + i, load(source + i));
  }
  if (i < n) {
    uint16_t rest[kLanes];
    const Vec x = load_part(source + i, n - i);
    if (dtype == QF_F16)
      store_f16(rest, x);
    else
      store_bf16(rest, x);
    for (int j = i; j < n; j++) halves[j] = rest[j - i];
  }
}

// Rotates a row to `position`; with `back` it inverts that (the transpose, which gradients need).
static inline void rotate_row(float* x, const QfRope& rope, int64_t position, bool back = false) {
  if (!rope.cos) return;
  const int half = rope.rotary_dim / 2;
  const int64_t row = position < 0 ? -position : position;
  if (row >= rope.rows) return;  // a query with no key to be rotated against: check_values let no other through
  const float* cosine = rope.cos + row * half;
  const float* sine = rope.sin + row * half;
  const float sign = (position < 0) != back ? -1.0f : 1.0f;
  if (rope.interleaved) {
    for (int i = 0; i < half; i++) {
      const float c = cosine[i], s = sign * sine[i], a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * c - b * s;
      x[2 * i + 1] = a * s + b * c;
    }
    return;
  }
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? half - i : kLanes;
    const Vec c = load_part(cosine + i, n), s = broadcast(sign) * load_part(sine + i, n);
    const Vec a = load_part(x + i, n), b = load_part(x + i + half, n);
    store_part(x + i, a * c - b * s, n);
    store_part(x + i + half, a * s + b * c, n);
  }
}

// Whether all numbers added to it are finite: a number times zero is zero, but infinity and NaN make NaN.
struct FiniteCheck {
  Vec seen = zero();
  void add(Vec x) { seen = fma(x, zero(), seen); }
  // Rows are zero up to a multiple of kLanes.
  void add_row(const float* row, int n) {
    for (int d = 0; d < n; d += kLanes) add(load(row + d));
  }
  bool finite() const { return sum(seen) == 0.0f; }
};

// a . b of two rows that are zero up to a multiple of kLanes.
static inline float dot_rows(const float* a, const float* b, int n) {
  Vec sums = zero();
  for (int d = 0; d < n; d += kLanes) sums = fma(load(a + d), load(b + d), sums);
  return sum(sums);
}

}  // namespace QF_ISA
}  // namespace qf
