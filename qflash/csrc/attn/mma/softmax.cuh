// Online softmax on tensor-core accumulators, in base 2. A lane holds rows g, g + 8, g + 16, .. of its warp's tile (its
// r-th row is row r % 2 of block r / 2) and shares each row with the three other lanes of its quad.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"

namespace qf {

// Weights are 2^(score - m), where m is an integer: moving it from one tile to the next scales by a power of two, so
// neither O nor the rounding of weights to 16 bits depends on where tiles begin. While a row's largest score exceeds m
// by less than this, m stays and O and l need no rescaling; weights then reach 2^kSlack, well inside float16.
constexpr float kSlack = 8.0f;

__device__ __forceinline__ float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// From q.k to base-2 scores. Nearly always that is one factor, applied in the exponential; scores that need more
// (softcap, or a scale that is not positive, with which neither maxima nor masked scores of -inf work) are computed
// beforehand.
__host__ __device__ __forceinline__ bool scales_plainly(float scale, float softcap) {
  return softcap == 0.0f && scale > 0.0f;
}

// The factor that the exponential applies.
__device__ __forceinline__ float score_factor(float scale, float softcap) {
  return scales_plainly(scale, softcap) ? scale * kLog2e : 1.0f;
}

// softcap * tanh(x / softcap) of a score in base 2. tanh(x) = 1 - 2 / (1 + e^2x), with an absolute error of 1e-7:
// enough for softcaps up to kMostCoarse, and a tenth of tanhf's code.
__device__ __forceinline__ float soften(float score, float softcap) {
  const float top = softcap * kLog2e;
  return top - __fdividef(2.0f * top, 1.0f + ex2(score * (2.0f / softcap)));
}

// That error is 2e-7 of softcap, however small the score is. Above this softcap small arguments use the series
// x - x^3/3 + 2x^5/15 - 17x^7/315, whose error is relative to its own result (3e-7 at kSmall, less below).
constexpr float kMostCoarse = 64.0f;
constexpr float kSmall = 0.25f;
__device__ __forceinline__ float soften_finely(float score, float softcap) {
  const float y = score * (2.0f / softcap);  // as in soften(): 2^y = e^2x, so x = y kHalf
  constexpr float kHalf = 0.5f / kLog2e, kSquare = kHalf * kHalf;
  const float square = y * y;
  float series = fmaf(square, -17.0f / 315.0f * kSquare * kSquare * kSquare, 2.0f / 15.0f * kSquare * kSquare);
  series = fmaf(square, fmaf(square, series, -1.0f / 3.0f * kSquare), 1.0f);
  return fabsf(y) < kSmall / kHalf ? score * series : soften(score, softcap);
}

__device__ __forceinline__ bool softens_coarsely(float softcap) { return softcap > 0.0f && softcap <= kMostCoarse; }

// Softcap of base-2 scores, if any. `coarsely`: softens_coarsely(softcap), computed once: this is one branch for the
// usual softcaps, where testing for 0 first would be two.
__device__ __forceinline__ void soften_four(float (&s)[4], float softcap, bool coarsely) {
  if (coarsely) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = soften(s[e], softcap);
  } else if (softcap != 0.0f) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = soften_finely(s[e], softcap);
  }
}

// Four scores at a time with a branch between them: otherwise the compiler would compute all of them concurrently and
// run out of registers.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void scale_scores(float (&S)[kMTiles][kNTiles][4], float scale, float softcap) {
  const bool coarsely = softens_coarsely(softcap);
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      float (&s)[4] = S[i][j];
#pragma unroll
      for (int e = 0; e < 4; ++e) s[e] *= scale * kLog2e;
      soften_four(s, softcap, coarsely);
    }
}

// Masks what rows do not see. column(j, e): key of S[.][j][2 h + e], counted from where `mask` counts.
template <int kMTiles, int kNTiles, class Column>
__device__ __forceinline__ void mask_scores(float (&S)[kMTiles][kNTiles][4], const TileMask<8>& mask, Column column) {
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) {
    const int begin = mask.begin(r), end = mask.end(r);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (column(j, e) < begin || column(j, e) >= end) S[r / 2][j][r % 2 * 2 + e] = -infinity();
  }
}

// Sums of the weights as PV multiplies them, rounded to 16 bits, for a lane's rows of one block of 16: h = 0, 1.
// Dividing by these instead of exact sums keeps rows averages of V however the weights were rounded. The tensor cores
// compute them as a product with a column of ones; that costs one mma in kChunks + 1, and saves the CUDA cores, which
// the softmax keeps busy, one addition per weight.
struct RoundedSums {
  float l[4] = {};  // of row h: l[2 h], in every lane of the quad

  __device__ __forceinline__ void add(int, float) {}
  __device__ __forceinline__ void rescale(int h, float factor) { l[2 * h] *= factor; }
  template <class Tensor>
  __device__ __forceinline__ void add_rounded(const uint32_t (&weights)[4]) {
    Tensor::multiply(l, weights, Tensor::kOnes, Tensor::kOnes);
  }
  __device__ __forceinline__ float of_row(int h) const { return l[2 * h]; }
  __device__ __forceinline__ float for_lse(int h) const { return l[2 * h]; }
};

// Sums in float32 of the weights before they are rounded, computed by the CUDA cores: needed for lse. Also usable as
// divisors where errors other than the weights' rounding dominate anyway.
struct ExactSums {
  float exact[2] = {};  // of this lane's weights

  __device__ __forceinline__ void add(int h, float weight) { exact[h] += weight; }
  __device__ __forceinline__ void rescale(int h, float factor) { exact[h] *= factor; }
  template <class Tensor>
  __device__ __forceinline__ void add_rounded(const uint32_t (&)[4]) {}
  __device__ __forceinline__ float of_row(int h) const {
    const float two = exact[h] + __shfl_xor_sync(0xffffffffu, exact[h], 1);
    return two + __shfl_xor_sync(0xffffffffu, two, 2);
  }
  __device__ __forceinline__ float for_lse(int h) const { return of_row(h); }
};

// Rounded sums to divide by, exact sums for lse.
struct BothSums {
  RoundedSums rounded;
  ExactSums exact;

  __device__ __forceinline__ void add(int h, float weight) { exact.add(h, weight); }
  __device__ __forceinline__ void rescale(int h, float factor) {
    rounded.rescale(h, factor);
    exact.rescale(h, factor);
  }
  template <class Tensor>
  __device__ __forceinline__ void add_rounded(const uint32_t (&weights)[4]) {
    rounded.template add_rounded<Tensor>(weights);
  }
  __device__ __forceinline__ float of_row(int h) const { return rounded.of_row(h); }
  __device__ __forceinline__ float for_lse(int h) const { return exact.of_row(h); }
};

// Statistics of a lane's rows in one block of 16.
template <class Sums>
struct RowStatistics {
  float m[2] = {-infinity(), -infinity()};  // base-2 reference of each row's weights; -inf: nothing seen yet
  Sums sums;
};

// The larger of two scores: as floats, or as the integers of their bit patterns, which orders positive floats and -inf
// and is half the work on GPUs that take the maximum of three integers at once.
struct AsFloats {
  __device__ static __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
};
struct AsIntegers {
  __device__ static __forceinline__ float larger(float a, float b) {
    const int32_t x = int32_t(float_to_bits(a)), y = int32_t(float_to_bits(b));
    return bits_to_float(uint32_t(x > y ? x : y));
  }
};

// top[r] <- largest of this lane's base-2 scores of row r.
template <class Compare, int kParts, int kMTiles, int kNTiles, class Slope, class Offset>
__device__ __forceinline__ void largest_scores(float (&top)[2 * kMTiles], const float (&S)[kMTiles][kNTiles][4],
                                               Slope slope, Offset offset) {
  constexpr int kRun = kNTiles / kParts;
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      float most = S[r / 2][c * kRun][r % 2 * 2];
#pragma unroll
      for (int j = c * kRun; j < (c + 1) * kRun; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) most = Compare::larger(most, S[r / 2][j][r % 2 * 2 + e]);
      most = fmaf(most, slope(r, c), offset(r, c));
      top[r] = c == 0 ? most : fmaxf(top[r], most);
    }
}

// S becomes weights; O and the sums of weights are rescaled where the reference had to move. Base-2 scores are
// slope(r, c) * S + offset(r, c), where the lane's columns fall into kParts runs c = 0 .. of equal length and slopes
// are not negative. positive: S, where it is visible, is positive.
template <int kParts, int kMTiles, int kNTiles, int kOTiles, class Slope, class Offset, class Rows>
__device__ __forceinline__ void online_softmax(float (&S)[kMTiles][kNTiles][4], Slope slope, Offset offset,
                                               Rows (&rows)[kMTiles], float (&O)[kMTiles][kOTiles][4],
                                               bool positive = false) {
  constexpr int kRun = kNTiles / kParts;
  float top[2 * kMTiles];
  if (positive)
    largest_scores<AsIntegers, kParts>(top, S, slope, offset);
  else
    largest_scores<AsFloats, kParts>(top, S, slope, offset);
  bool moved = false;
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) {
    top[r] = max_of_quad(top[r]);
    moved |= top[r] > rows[r / 2].m[r % 2] + kSlack;  // -inf + kSlack: the first finite score moves it
  }
  if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
    for (int r = 0; r < 2 * kMTiles; ++r) {
      float& m = rows[r / 2].m[r % 2];
      const float larger = fmaxf(m, ceilf(top[r])), rescale = ex2(m - reference_of(larger));
      m = larger;
      rows[r / 2].sums.rescale(r % 2, rescale);
#pragma unroll
      for (int j = 0; j < kOTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) O[r / 2][j][r % 2 * 2 + e] *= rescale;
    }
  }
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      const float shift = offset(r, c) - reference_of(rows[r / 2].m[r % 2]);
#pragma unroll
      for (int j = c * kRun; j < (c + 1) * kRun; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = S[r / 2][j][r % 2 * 2 + e];
          s = ex2(fmaf(s, slope(r, c), shift));
          rows[r / 2].sums.add(r % 2, s);
        }
    }
}

}  // namespace qf
