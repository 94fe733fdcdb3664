// Steps 1 to 3 of int8.h: rotate, smooth, quantize, pack.
#pragma once

#include "int8.h"
#include "int8_dots.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {

// Room for one row in float32, so that whole vectors may be read and written.
constexpr int kRowFloats = kMaxHeadDim + kLanes;

static inline int depth_groups(int head_dim) { return int(round_up(head_dim, kDepthStep)) / kPack; }
// Distance between rows of integers: whole vectors and, with AMX, whole tiles.
static inline int integer_stride(int head_dim) { return int(round_up(round_up(head_dim, kDepthStep), 16)); }
static inline int64_t panel_bytes(int head_dim) {
  return int64_t(depth_groups(head_dim) + (kBiased ? 1 : 0)) * kInt8Panel * 4;
}

static inline void clear(float* x, int from, int to) {
  for (int i = from; i < to; i++) x[i] = 0.0f;
}

// True when none of x[0, n) is infinite or NaN; x is zero up to a multiple of kLanes.
static inline bool all_finite(const float* x, int n) {
  FiniteCheck check;
  check.add_row(x, n);
  return check.finite();
}

// Rotated key as float32, zeros up to a multiple of kLanes.
static inline void load_key(const QfAttnParams& p, const Sequence& s, int64_t kv_head, int64_t key, float* x) {
  load_row(x, row_address(p.kv.k, p.dtype, s.batch, s.first_k + key, kv_head), p.dtype, p.head_dim);
  clear(x, p.head_dim, int(round_up(p.head_dim, kLanes)));
  rotate_row(x, p.rope, key_position(p, s, key));
}

static int32_t sum_keys(const QfAttnParams& p, const Sequence& s, int64_t kv_head, int64_t first, int64_t last,
                        float* total) {
  alignas(64) float x[kRowFloats], sums[kRowFloats];
  clear(sums, 0, kRowFloats);
  int32_t finite = 0;
  for (int64_t key = first; key < last; key++) {
    load_key(p, s, kv_head, key, x);
    if (!all_finite(x, p.head_dim)) continue;
    finite++;
    for (int i = 0; i < p.head_dim; i += kLanes) store(sums + i, load(sums + i) + load(x + i));
  }
  memcpy(total, sums, size_t(p.head_dim) * 4);
  return finite;
}

// Integers of x[0, n) and their scale. Rounding keeps |x * 127 / max|x|| within 127, so no clamp is needed.
static inline float quantize_row(const float* x, int n, Integer* integers) {
  Vec highest = zero();
  for (int i = 0; i < n; i += kLanes) {
    const Vec value = load(x + i);
    highest = vmax(vmax(value, -value), highest);
  }
  const float amplitude = max(highest);
  const bool finite = all_finite(x, n), usable = finite && amplitude >= kInt8NoAmplitude;
  const Vec inverse = broadcast(usable ? 127.0f / amplitude : 0.0f);
  if (!usable) {
    for (int i = 0; i < n; i += kLanes) store_integers(integers + i, zero());
    return finite ? 0.0f : __builtin_nanf("");
  }
  for (int i = 0; i < n; i += kLanes) store_integers(integers + i, load(x + i) * inverse);
  return amplitude / 127.0f;
}

// Keys [first, first + kInt8Panel): those past the sequence's end are zeros.
static void pack_panel(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first) {
  constexpr int kStride = (kMaxHeadDim + kLanes) * int(sizeof(Integer)) / 4;  // in groups of four bytes
  alignas(64) uint32_t rows[kInt8Panel][kStride];
  alignas(64) float x[kRowFloats];
  memset(rows, 0, sizeof rows);
  for (int j = 0; j < kInt8Panel; j++) {
    const int64_t key = first + j;
    head.key_scales[key] = 0.0f;
    if (key >= s.len_k) continue;
    load_key(p, s, head.kv_head, key, x);
    for (int i = 0; i < p.head_dim; i += kLanes) store(x + i, load(x + i) - load(head.mean + i));
    head.key_scales[key] = quantize_row(x, p.head_dim, reinterpret_cast<Integer*>(rows[j]));
  }
  const int groups = depth_groups(p.head_dim);
  uint32_t* panel = reinterpret_cast<uint32_t*>(head.keys + first / kInt8Panel * panel_bytes(p.head_dim));
  for (int g = 0; g < groups; g++)
    for (int j = 0; j < kInt8Panel; j++) panel[g * kInt8Panel + j] = rows[j][g];
  if (kBiased)
    for (int j = 0; j < kInt8Panel; j++) {
      const Integer* integers = reinterpret_cast<const Integer*>(rows[j]);
      int32_t sum = 0;
      for (int i = 0; i < groups * kPack; i++) sum += int32_t(integers[i]);
      panel[groups * kInt8Panel + j] = uint32_t(-128 * sum);
    }
}

// Values [first, first + kInt8KeyStep) with zeros for nonfinite ones and past the end; true if any was nonfinite.
static bool pack_value_rows(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first) {
  alignas(64) float rows[kInt8KeyStep * kMaxHeadDim + kLanes];
  const int width = value_width(p.head_dim);
  bool nonfinite = false;
  for (int j = 0; j < kInt8KeyStep; j++) {
    float* row = rows + j * width;
    const int64_t key = first + j;
    const int n = key < s.len_k ? p.head_dim : 0;
    if (n) load_row(row, row_address(p.kv.v, p.dtype, s.batch, s.first_k + key, head.kv_head), p.dtype, n);
    clear(row, n, width);
    if (n && !all_finite(row, n)) {
      nonfinite = true;
      for (int d = 0; d < n; d++)
        if (!__builtin_isfinite(row[d])) row[d] = 0.0f;
    }
  }
  pack_values(head.values + first * value_bytes(p.head_dim), rows, p.head_dim, kInt8KeyStep);
  return nonfinite;
}

static void pack_block(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t block) {
  const int64_t first = block * kInt8KeyBlock, end = round_up(s.len_k, kInt8KeyStep);
  const int64_t last = first + kInt8KeyBlock < end ? first + kInt8KeyBlock : end;
  bool nonfinite = false;
  for (int64_t key = first; key < last; key += kInt8Panel) pack_panel(p, s, head, key);
  for (int64_t key = first; key < last; key += kInt8KeyStep) nonfinite |= pack_value_rows(p, s, head, key);
  head.nonfinite[block] = nonfinite;
}

}  // namespace QF_ISA
}  // namespace qf
