// Online softmax on a thread's share of a row.
#pragma once

#include "reduce/row.cuh"
#include "reduce/states.cuh"

namespace qf {

// How scores are taken from x: 2^((x_factor x - m) factor). Differences first, so that no finite x overflows on its
// way.
struct ScoreMap {
  float x_factor, factor;
};

// softmax(scale x) changes the sign of x where scale is negative. Where it is 0, x becomes 0, or NaN if it was not
// finite. Where it is so small that a difference past the largest float would still count, x is halved.
__device__ __forceinline__ ScoreMap score_map(float scale) {
  constexpr float kLargest = 3.402823466e38f, kSmall = 7.8886090522101181e-31f;  // 2^-100
  if (scale == 0.0f) return {0.0f, 1.0f};
  const float magnitude = fabsf(scale), x_factor = magnitude < kSmall ? 0.5f : 1.0f;
  return {scale < 0.0f ? -x_factor : x_factor, fminf(magnitude * kLog2e / x_factor, kLargest)};
}

// The team's granules from `first` on, as softmax wants them: absent elements weigh nothing.
template <class Share, class Element, class Team>
__device__ __forceinline__ void load_scores(Share& share, const Element* g_row, const RowCut& cut, const Team& team,
                                            int first, const ScoreMap& map) {
  share.load(g_row, cut, team, first, -infinity());
  if (map.x_factor != 1.0f) share.change_present([&](float x) { return x * map.x_factor; });
}

// Scores become weights relative to `m`.
template <class Share>
__device__ __forceinline__ void weigh(Share& share, float m, float factor) {
  const float reference = reference_of(m);
  share.change_all([&](float x) { return ex2((x - reference) * factor); });
}

// Scores become weights relative to their own maximum; it and their sum are the state of the share.
template <class Share>
__device__ __forceinline__ Peak peak_of(Share& share, float factor) {
  const float m = share.largest();
  weigh(share, m, factor);
  return {m, share.sum()};
}

}  // namespace qf
