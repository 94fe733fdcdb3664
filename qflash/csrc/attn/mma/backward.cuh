// The backward pass on tensor-core fragments. A warp owns 16 kMTiles stationary rows (keys, or queries); columns (the
// other) stream by. Scores, weights P and their gradients dS are in accumulators as in the forward pass (product.cuh)
// and are rounded in place to the A operand of the products that add to dK, dV or dQ.
//
//   P = 2^(score - lse)     dS = P * slope * (dP - delta)     slope: of softcap, 1 without
//
// Weights of a row of n keys are about 1/n, and float16's least normal number is 2^-14. So float16 multiplies P by 2^8
// and dS by 2^4, powers of two that cost nothing (they are part of lse and delta) and are removed at the store. P is at
// most 1; dS has no bound, and has a margin of 2^12 before it overflows.
#pragma once

#include "attn/mask.cuh"
#include "attn/mma/nonfinite.cuh"
#include "attn/mma/product.cuh"
#include "attn/mma/softmax.cuh"
#include "ptx/mov.cuh"

namespace qf {

template <class Element>
struct GradientShift {
  static constexpr float kWeights = kIsF16<Element> ? 8.0f : 0.0f;        // P is scaled by 2^this
  static constexpr float kGradient = kIsF16<Element> ? 0x1p-4f : 1.0f;    // dP - delta is multiplied by this,
  static constexpr float kOffWeights = kIsF16<Element> ? 0x1p-8f : 1.0f;  // and these remove the factors
  static constexpr float kOffGradient = kIsF16<Element> ? 0x1p-4f : 1.0f;
};

// Four numbers in the layout of an accumulator.
struct Four {
  float x[4];
};

// The derivative of softcap * tanh(score / softcap), of a score in base 2, without cancellation.
__device__ __forceinline__ float softcap_slope(float score, float softcap) {
  const float z = ex2(-fabsf(score) * (2.0f / softcap));
  return __fdividef(4.0f * z, (1.0f + z) * (1.0f + z));
}

// How a score becomes a weight. kPlain: scales_plainly(). kAnew: what is computed from softcap is recomputed each time;
// otherwise the compiler would keep it in 30 registers from tile to tile.
template <bool kPlain, bool kAnew = false>
struct Scores {
  float scale, softcap, factor;  // factor: score_factor()

  __device__ __forceinline__ explicit Scores(const QfAttnParams& p)
      : scale(p.scale),
        softcap(kAnew ? bits_to_float(fresh(float_to_bits(p.softcap))) : p.softcap),
        factor(score_factor(scale, softcap)) {}
};

// S, raw scores, becomes P * slope, and A becomes P, rounded. minus_lse(i, j): for the accumulator's four elements, in
// base 2. kPartial: invisible pairs get 0, by `mask`, which counts from the first column.
template <class Tensor, bool kPartial, bool kPlain, bool kAnew, int kMTiles, int kNTiles, class MinusLse>
__device__ __forceinline__ void weigh(float (&S)[kMTiles][kNTiles][4], uint32_t (&A)[kMTiles][kNTiles / 2][4],
                                      const Scores<kPlain, kAnew>& scores, MinusLse minus_lse,
                                      const TileMask<8>& mask) {
  const bool coarsely = softens_coarsely(scores.softcap);
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      float (&s)[4] = S[i][j];
      const auto weights = [&] {
        const Four lse = minus_lse(i, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[e] = ex2(fmaf(s[e], scores.factor, lse.x[e]));
          if (kPartial && !mask(2 * i + e / 2, 8 * j + e % 2)) s[e] = 0.0f;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) A[i][j / 2][j % 2 * 2 + h] = Tensor::pair(s[2 * h], s[2 * h + 1]);
      };
      if constexpr (kPlain) {
        weights();
      } else {  // four scores at a time, because slopes take registers
        float slope[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[e] *= scores.scale * kLog2e;
          slope[e] = scores.softcap != 0.0f ? softcap_slope(s[e], scores.softcap) : 1.0f;
        }
        soften_four(s, scores.softcap, coarsely);
        weights();
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] *= slope[e];
      }
    }
}

// A becomes dS, rounded, from dP and from P * slope in S. minus_delta(i, j): for the four elements, times `factor`.
template <class Tensor, bool kPartial, int kMTiles, int kNTiles, class MinusDelta>
__device__ __forceinline__ void differentiate(const float (&S)[kMTiles][kNTiles][4],
                                              const float (&dP)[kMTiles][kNTiles][4],
                                              uint32_t (&A)[kMTiles][kNTiles / 2][4], float factor,
                                              MinusDelta minus_delta, const TileMask<8>& mask) {
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const Four delta = minus_delta(i, j);
      float ds[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ds[e] = S[i][j][e] * fmaf(dP[i][j][e], factor, delta.x[e]);
        if (kPartial && !mask(2 * i + e / 2, 8 * j + e % 2)) ds[e] = 0.0f;  // 0 times a nonfinite value
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) A[i][j / 2][j % 2 * 2 + h] = Tensor::pair(ds[2 * h], ds[2 * h + 1]);
    }
}

// Both halves of a word, with 0 for nonfinite ones.
template <class Element>
__device__ __forceinline__ uint32_t finite_halves(uint32_t word) {
  const uint32_t low = word_nonfinite<Element>(word & 0xffffu) ? 0u : word & 0xffffu;
  const uint32_t high = word_nonfinite<Element>(word & 0xffff0000u) ? 0u : word & 0xffff0000u;
  return low | high;
}

// acc += A X. s_x: 16 kSteps rows of kRowChunks chunks of channels, of which the warp has kChunks, from the first on
// or, if that is a multiple of 8, from where s_x points to. clean (with kPartial): nonfinite values of X count as 0;
// add_nonfinite_columns() adds them to the rows that see them.
template <class Element, class Tensor, int kRowChunks, bool kPartial, int kMTiles, int kChunks, int kSteps>
__device__ __forceinline__ void update_mma(float (&acc)[kMTiles][kChunks][4], const uint32_t (&A)[kMTiles][kSteps][4],
                                           const char* s_x, int lane, bool clean) {
  static_assert(kChunks == kRowChunks || kChunks % 8 == 0, "a part must be a multiple of the swizzle's width");
  const auto x_lane = rows_then_chunks<kRowChunks>(lane);
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; ++pair) {
      uint32_t x[4];
      ldmatrix_x4_trans(x, s_x + x_lane.at(16 * k, pair));
      if (kPartial && clean) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = finite_halves<Element>(x[e]);
      }
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        Tensor::multiply(acc[i][2 * pair], A[i][k], x[0], x[1]);
        Tensor::multiply(acc[i][2 * pair + 1], A[i][k], x[2], x[3]);
      }
    }
}

// The values that update_mma() left out, times A, for the rows that see their column. Columns are processed serially:
// this happens only in tiles that hold NaN or infinity and are partly masked.
template <class Element, class Tensor, int kRowChunks, int kMTiles, int kChunks, int kSteps>
__device__ __forceinline__ void add_nonfinite_columns(float (&acc)[kMTiles][kChunks][4],
                                                      const uint32_t (&A)[kMTiles][kSteps][4], const char* s_x,
                                                      int lane, const TileMask<8>& mask) {
  const int t = lane % 4;
#pragma unroll 1
  for (int column = 0; column < 16 * kSteps; ++column) {
    float weight[kMTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 2 * kSteps; ++j)
          word |= A[i][j / 2][j % 2 * 2 + h] & (0u - uint32_t(column / 8 == j));  // indexing A would put it in memory
        word = __shfl_sync(0xffffffffu, word, lane - t + column % 8 / 2);
        weight[i][h] = column % 2 ? Tensor::high(word) : Tensor::low(word);
      }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(s_x + Swizzle<kRowChunks>::offset(column, j) + 4 * t);
      if (!word_nonfinite<Element>(word)) continue;
      const float x[2] = {Tensor::low(word), Tensor::high(word)};
#pragma unroll
      for (int i = 0; i < kMTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (x[e % 2] * 0.0f != 0.0f && mask(2 * i + e / 2, column - 2 * t))
            acc[i][j][e] += weight[i][e / 2] * x[e % 2];
    }
  }
}

// Accumulators of a warp's rows into float32 rows of shared memory, 2 kRowChunks chunks each and swizzled likewise.
// s_rows: the warp's first row, whose index in the tile is a multiple of 16; first: where the warp's channels begin, in
// chunks of 16-bit elements.
template <int kRowChunks, int kMTiles, int kChunks>
__device__ __forceinline__ void stage_rows(const float (&acc)[kMTiles][kChunks][4], char* s_rows, int lane,
                                           int first = 0) {
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      *reinterpret_cast<float2*>(
          s_rows + Swizzle<2 * kRowChunks>::offset(8 * r + lane / 4, 2 * (first + j) + lane % 4 / 2) + lane % 2 * 8) =
          make_float2(acc[r / 2][j][r % 2 * 2], acc[r / 2][j][r % 2 * 2 + 1]);
}

}  // namespace qf
