// The states of row reductions: several numbers that are combined together, so that one reduction per row suffices.
// Combine... combines two states; ...OfWarp combines those of a warp's lanes, with one pass through the tree for each
// number instead of one for all: each step of the tree is then a plain sum or maximum.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "ptx/rcp.cuh"
#include "reduce/warp.cuh"

namespace qf {

// Online softmax of some numbers x: the largest, and the sum of 2^((x - m) factor).
struct Peak {
  float m, l;
};
__device__ __forceinline__ Peak no_peak() { return {-infinity(), 0.0f}; }

// The factor that rescales a sum from the maximum `from` to `to` >= from. Equality is tested first: both may be
// infinite.
__device__ __forceinline__ float rescale_of(float from, float to, float factor) {
  return from == to ? 1.0f : ex2((from - to) * factor);
}

// fmaxf drops NaN, which stays in the sum.
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

// Count, mean and sum of squared differences from the mean of some numbers. The mean is mean + rest: rounding it
// to 24 bits would be visible in the result if a row's mean is large compared with its deviation.
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

// The same for all lanes at once: first the mean, as its distance from lane 0's, so that an offset costs no accuracy;
// then squared deviations from it. If any lane of a warp has numbers, lane 0 does.
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
