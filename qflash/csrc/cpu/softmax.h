// Online softmax of one row against one tile of keys.
//
// Weights are 2^((s - m) * factor) with m the running maximum of the raw scores: the difference comes first, so the
// largest weight is exactly 1 however large the scores are. Only the visible range of a row is ever read, so whatever
// stands in masked places (NaN too) cannot leak.
#pragma once

#include "vec.h"

namespace qf {
namespace QF_ISA {

// What all rows share. The scale's sign has been given to q, so that factor >= 0 and the largest score stays the
// largest.
struct ScoreMap {
  float factor;
  float cap;          // 0: no softcap
  float inverse_cap;  // scale / cap
  float unit;         // what one unit of s is worth as a logarithm
};

struct RowState {
  float m;  // running maximum of s; -inf at first
  float l;  // running sum of 2^((s - m) * factor)
};

constexpr float kInfinity = __builtin_inff();

// s -> cap * tanh(s * scale / cap) in place on [begin, end).
static inline void apply_softcap(float* s, int begin, int end, const ScoreMap& map) {
  for (int j = begin; j < end; j += kLanes) {
    const int n = end - j < kLanes ? end - j : kLanes;
    const Vec x = load_part(s + j, n) * broadcast(map.inverse_cap);
    store_part(s + j, broadcast(map.cap) * tanh(x), n);
  }
}

// Turns scores s[begin, end) into weights, updates the state and returns what the row of O must be multiplied by.
// The row's max ignores NaN; the NaN then reappears in the weights and in l.
static inline float online_softmax(float* s, int begin, int end, const ScoreMap& map, RowState* state) {
  if (begin >= end) return 1.0f;
  if (map.cap != 0.0f) apply_softcap(s, begin, end, map);
  const int whole = begin + (end - begin) / kLanes * kLanes, rest = end - whole;
  const Vec lowest = broadcast(-kInfinity);
  Vec top0 = lowest, top1 = lowest;
  int j = begin;
  for (; j + 2 * kLanes <= whole; j += 2 * kLanes) {
    top0 = vmax(load(s + j), top0);
    top1 = vmax(load(s + j + kLanes), top1);
  }
  if (j < whole) top0 = vmax(load(s + j), top0);
  if (rest) top1 = vmax(first_or(load_part(s + whole, rest), rest, lowest), top1);
  const float old = state->m, here = max(vmax(top0, top1));
  const float m = here > old ? here : old;
  // While every score is -inf there is nothing to subtract: the weights are 0 and l stays 0.
  const float shift = m == -kInfinity ? 0.0f : m;

  const Vec factor = broadcast(map.factor), origin = broadcast(shift);
  Vec sum0 = zero(), sum1 = zero();
  j = begin;
  for (; j + 2 * kLanes <= whole; j += 2 * kLanes) {
    const Vec p0 = exp2_nonpositive((load(s + j) - origin) * factor);
    const Vec p1 = exp2_nonpositive((load(s + j + kLanes) - origin) * factor);
    store(s + j, p0);
    store(s + j + kLanes, p1);
    sum0 = sum0 + p0;
    sum1 = sum1 + p1;
  }
  if (j < whole) {
    const Vec p = exp2_nonpositive((load(s + j) - origin) * factor);
    store(s + j, p);
    sum0 = sum0 + p;
  }
  if (rest) {
    const Vec p = exp2_nonpositive((load_part(s + whole, rest) - origin) * factor);
    store_part(s + whole, p, rest);
    sum1 = sum1 + first_or(p, rest, zero());
  }
  float alpha = old == m ? 1.0f : 0.0f;
  if (old != m && old != -kInfinity) {
    float lanes[kLanes];
    store(lanes, exp2_nonpositive(broadcast((old - m) * map.factor)));
    alpha = lanes[0];
  }
  state->m = m;
  state->l = state->l * alpha + sum(sum0 + sum1);
  return alpha;
}

}  // namespace QF_ISA
}  // namespace qf
