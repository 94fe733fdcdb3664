// What row reductions carry: several numbers that are combined together, so that one reduction does for a row. Two
// states by Combine...; those of a warp's lanes by ...OfWarp, which goes through the tree once for each number instead
// of once with all of them: the tree then has a plain sum or maximum at each step.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "ptx/rcp.cuh"
#include "reduce/warp.cuh"

namespace qf {

// Online softmax of some numbers x: the greatest, and the sum of 2^((x - m) factor).
struct Peak {
  float m, l;
};
__device__ __forceinline__ Peak no_peak() { return {-infinity(), 0.0f}; }

// What a sum relative to the maximum `from` is multiplied by to be relative to `to` >= from. Equal ones first: they may
// both be infinite.
__device__ __forceinline__ float rescale_of(float from, float to, float factor) {
  return from == to ? 1.0f : ex2((from - to) * factor);
}

// NaN passes fmaxf by and stays in the sum.
struct CombinePeaks {
  float factor;

  __device__ __forceinline__ Peak operator()(const Peak& a, const Peak& b) const {
    const float m = fmaxf(a.m, b.m);
    const bool a_higher = a.m == m;
    const float low = a_higher ? b.m : a.m, low_sum = a_higher ? b.l : a.l, high_sum = a_higher ? a.l : b.l;
    return {m, fmaf(low_sum, rescale_of(low, m, factor), high_sum)};
  }
};

struct PeakOfWarp {
  float factor;

  __device__ __forceinline__ Peak operator()(const Peak& mine, int width) const {
    const float m = max_of_warp(mine.m, width);
    return {m, sum_of_warp(mine.l * rescale_of(mine.m, m, factor), width)};
  }
};

// Count, mean and sum of squared differences from the mean of some numbers. The mean is mean + rest: a mean of 24 bits
// would show in the result wherever a row's mean is large against its deviation.
struct Moments {
  float count, mean, rest, m2;
};

__device__ __forceinline__ Moments no_moments() { return {0.0f, 0.0f, 0.0f, 0.0f}; }

// mean + rest <- a + b, exactly (Knuth's two-sum).
__device__ __forceinline__ void two_sum(float a, float b, float& mean, float& rest) {
  mean = a + b;
  const float b_part = mean - a;
  rest = (a - (mean - b_part)) + (b - b_part);
}

// Chan, Golub and LeVeque's update for two parts of a sample.
struct CombineMoments {
  __device__ __forceinline__ Moments operator()(const Moments& a, const Moments& b) const {
    Moments all;
    all.count = a.count + b.count;
    const float share = b.count == 0.0f ? 0.0f : b.count * rcp(all.count);
    const float step = (b.mean - a.mean) + (b.rest - a.rest);
    two_sum(a.mean, fmaf(step, share, a.rest), all.mean, all.rest);
    all.m2 = fmaf(step * (a.count * share), step, a.m2 + b.m2);
    return all;
  }
};

// The same for all lanes at once: first the mean, by its distance from lane 0's, which no offset harms; then squared
// deviations from it. Lane 0 of a warp that has any number has one.
struct MomentsOfWarp {
  __device__ __forceinline__ Moments operator()(const Moments& mine, int width) const {
    const float mean = __shfl_sync(0xffffffffu, mine.mean, 0), rest = __shfl_sync(0xffffffffu, mine.rest, 0);
    Moments all;
    all.count = sum_of_warp(mine.count, width);
    const float far = (mine.mean - mean) + (mine.rest - rest);
    const float sum = sum_of_warp(mine.count * far, width);
    const float step = all.count == 0.0f ? 0.0f : sum * rcp(all.count);
    const float apart = far - step;
    all.m2 = sum_of_warp(fmaf(mine.count * apart, apart, mine.m2), width);
    two_sum(mean, rest + step, all.mean, all.rest);
    return all;
  }
};

}  // namespace qf
