// Online softmax of one row against one tile of keys.
//
// Weights are 2^((s - m) * factor) with m the running maximum of the raw scores: the difference comes first, so the
// largest weight is exactly 1 however large the scores are. Only the visible range of a row is ever read, so masked
// elements (NaN too) cannot leak.
#pragma once

#include "multiply.h"
#include "vec.h"

namespace qf {
namespace QF_ISA {

// What all rows share. The sign of the scale is applied to q, so that factor >= 0 and the largest score stays the
// largest.
struct ScoreMap {
  float factor;
  float lowest;       // -126 / factor: weights below 2^-126 are zero
  float cap;          // 0: no softcap
  float inverse_cap;  // scale / cap
  float unit;         // what one unit of s is worth as a logarithm
};

struct RowState {
  float m;  // running maximum of s; -inf at first
  float l;  // running sum of 2^((s - m) * factor)
};

// Rows in whole vectors: room for what is computed for all rows at once.
constexpr int kRowSlots = (kMaxRows + kLanes - 1) / kLanes * kLanes;

constexpr float kInfinity = __builtin_inff();

// s -> cap * tanh(s * scale / cap) in place on [begin, end).
static inline void apply_softcap(float* s, int begin, int end, const ScoreMap& map) {
  for (int j = begin; j < end; j += kLanes) {
    const int n = end - j < kLanes ? end - j : kLanes;
    const Vec x = load_part(s + j, n) * broadcast(map.inverse_cap);
    store_part(s + j, broadcast(map.cap) * tanh(x), n);
  }
}

// Largest of s[begin, end), ignoring NaN; -inf when there is none.
static inline float row_max(const float* s, int begin, int end) {
  const Vec lowest = broadcast(-kInfinity);
  Vec top0 = lowest, top1 = lowest;
  int j = begin;
  for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
    top0 = vmax(load(s + j), top0);
    top1 = vmax(load(s + j + kLanes), top1);
  }
  for (; j < end; j += kLanes) {
    const int n = end - j < kLanes ? end - j : kLanes;
    top0 = vmax(first_or(load_part(s + j, n), n, lowest), top0);
  }
  return max(vmax(top0, top1));
}

// Scores s[begin, end) to weights 2^((s - m) * factor); returns their sum.
static inline float row_weights(float* s, int begin, int end, float m, const ScoreMap& map) {
  // While every score is -inf there is nothing to subtract: the weights are 0.
  const Vec origin = broadcast(m == -kInfinity ? 0.0f : m);
  const Vec factor = broadcast(map.factor), lowest = broadcast(map.lowest);
  Vec sum0 = zero(), sum1 = zero();
  int j = begin;
  for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
    const Vec p0 = exp2_nonpositive(load(s + j) - origin, factor, lowest);
    const Vec p1 = exp2_nonpositive(load(s + j + kLanes) - origin, factor, lowest);
    store(s + j, p0);
    store(s + j + kLanes, p1);
    sum0 = sum0 + p0;
    sum1 = sum1 + p1;
  }
  for (; j < end; j += kLanes) {
    const int n = end - j < kLanes ? end - j : kLanes;
    const Vec p = exp2_nonpositive(load_part(s + j, n) - origin, factor, lowest);
    store_part(s + j, p, n);
    sum0 = sum0 + first_or(p, n, zero());
  }
  return sum(sum0 + sum1);
}

// The part of a tile that a row sees: keys [begin, end) counted from the tile's first.
struct Span {
  int begin, end;
};

// Turns `rows` rows of scores, `pitch` apart, into weights over their spans, updates their states and returns the alpha
// by which each row of O must be multiplied. Step by step over all rows: the steps of one row depend on each other,
// those of different rows do not. A row's max ignores NaN; the NaN reappears in its weights and in l.
static inline void online_softmax(float* s, int64_t pitch, int rows, const Span* spans, const ScoreMap& map,
                                  RowState* states, float* alpha) {
  float m[kRowSlots], change[kRowSlots] = {};
  for (int i = 0; i < rows; i++) {
    if (map.cap != 0.0f) apply_softcap(s + i * pitch, spans[i].begin, spans[i].end, map);
    const float here = row_max(s + i * pitch, spans[i].begin, spans[i].end), before = states[i].m;
    m[i] = here > before ? here : before;
  }
  for (int i = 0; i < rows; i++) change[i] = m[i] == states[i].m ? 0.0f : states[i].m - m[i];
  for (int i = 0; i < rows; i += kLanes)
    store(alpha + i, exp2_nonpositive(load(change + i), broadcast(map.factor), broadcast(map.lowest)));
  for (int i = 0; i < rows; i++) {
    if (change[i] == -kInfinity) alpha[i] = 0.0f;  // also when factor is 0
    const float total = row_weights(s + i * pitch, spans[i].begin, spans[i].end, m[i], map);
    states[i] = {m[i], states[i].l * alpha[i] + total};
  }
}

}  // namespace QF_ISA
}  // namespace qf
