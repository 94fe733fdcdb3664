// Online softmax on a thread's share of a row.
#pragma once

#include "reduce/row.cuh"
#include "reduce/states.cuh"

namespace qf {

// How weights are computed from x: 2^((x_factor x - m) factor). Differences are taken first, so that no finite x
// overflows.
struct ScoreMap {
  float x_factor, factor;
};

// softmax(scale x): if scale is negative, the sign of x changes. If scale is 0, x becomes 0, or NaN if it is nonfinite.
// If scale is so small that a difference past the largest float still matters, x is halved.
__device__ __forceinline__ ScoreMap score_map(float scale) {
  constexpr float kLargest = 3.402823466e38f, kSmall = 7.8886090522101181e-31f;  // 2^-100
  if (scale == 0.0f) return {0.0f, 1.0f};
  const float magnitude = fabsf(scale), x_factor = magnitude < kSmall ? 0.5f : 1.0f;
  return {scale < 0.0f ? -x_factor : x_factor, fminf(magnitude * kLog2e / x_factor, kLargest)};
}

// Loads the team's granules from `first` on as scores: absent elements have weight 0.
template <class Share, class Element, class Team>
__device__ __forceinline__ void load_scores(Share& share, const Element* g_row, const RowCut& cut, const Team& team,
                                            int first, const ScoreMap& map) {
  share.load(g_row, cut, team, first, -infinity());
  if (map.x_factor != 1.0f) share.change_present([&](float x) { return x * map.x_factor; });
}

// Turns scores into weights relative to `m`.
template <class Share>
__device__ __forceinline__ void weigh(Share& share, float m, float factor) {
  const float reference = reference_of(m);
  share.change_all([&](float x) { return ex2((x - reference) * factor); });
}

// Turns scores into weights relative to their own maximum; returns that and the sum of weights, the share's state.
template <class Share>
__device__ __forceinline__ Peak peak_of(Share& share, float factor) {
  const float m = share.largest();
  weigh(share, m, factor);
  return {m, share.sum()};
}

}  // namespace qf
