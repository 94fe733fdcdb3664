// From S and dP to P and dS, in the accumulators of one warpgroup: P = 2^(c S - lse'), dS = P (dP - delta). No barrier
// is waited for here (consumer_keys.cuh and consumer_queries.cuh do that). If queries are columns, the accumulators of
// dP are initialised to -delta, so that the MMA yields dP - delta: 32 additions less, and no load between the MMA and
// its use.
//
// A lane has two rows, g and g + 8, and columns 8 j + 2 t and 8 j + 2 t + 1 (ptx/wgmma.cuh).
#pragma once

#include "attn/wgmma/backward/shared_memory.cuh"
#include "attn/wgmma/softcap.cuh"
#include "attn/wgmma/softmax.cuh"
#include "ptx/ex2.cuh"
#include "ptx/order.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// -lse', where lse' = lse log2(e) - shift, and delta: of the lane's rows, if these are queries, ...
struct RowStatistics {
  static constexpr bool kPreset = false;  // is dP initialised to -delta?
  float minus_lse_of[2], delta_of[2];

  struct Pair {
    float at[2];
    __device__ __forceinline__ float operator()(int e) const { return at[e / 2]; }
  };
  __device__ __forceinline__ Pair minus_lse(int) const { return {{minus_lse_of[0], minus_lse_of[1]}}; }
  __device__ __forceinline__ Pair delta(int) const { return {{delta_of[0], delta_of[1]}}; }
};
// ... or of its columns, from shared memory: -lse' is loaded before the wait for S.
template <int kNTiles>
struct ColumnStatistics {
  static constexpr bool kPreset = true;
  const float *s_minus_lse, *s_minus_delta;  // of the lane's first column
  float2 minus_lse_of[kNTiles];

  struct Pair {
    float2 at;
    __device__ __forceinline__ float operator()(int e) const { return e % 2 ? at.y : at.x; }
  };
  __device__ __forceinline__ ColumnStatistics(const float* s_first_lse, const float* s_first_delta)
      : s_minus_lse(s_first_lse), s_minus_delta(s_first_delta) {}

  __device__ __forceinline__ void preset(float (&dP)[kNTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(s_minus_delta + 8 * j);
      dP[j][0] = dP[j][2] = x.x, dP[j][1] = dP[j][3] = x.y;
    }
  }
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) minus_lse_of[j] = *reinterpret_cast<const float2*>(s_minus_lse + 8 * j);
  }
  __device__ __forceinline__ Pair minus_lse(int j) const { return {minus_lse_of[j]}; }
  __device__ __forceinline__ Pair delta(int) const { return {}; }
};

// Which columns of a tile that begins at column0 the lane's rows see, counted from the lane's first column.
struct MetColumns {
  KeyRange of[2];

  template <class Config>
  __device__ __forceinline__ MetColumns(const WorkTile<Config>& work, int column0) {
    const int row = first_own_row<Config>() + lane_index() / 4, column = column0 + lane_index() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of[h].begin = work.window.begin + row + 8 * h - column;
      of[h].end = min(work.window.end + row + 8 * h, work.mask.len_k) - column;
      // Rows of keys that do not exist may hold anything, and their dS is multiplied with zeros: it must be finite.
      if (Config::kStoresDs && row + 8 * h >= work.live) of[h] = {0, 0};
    }
  }
  __device__ __forceinline__ bool has(int h, int column) const { return column >= of[h].begin && column < of[h].end; }
  // Zeros what rows do not see.
  template <int kNTiles>
  __device__ __forceinline__ void keep(float (&x)[kNTiles][4]) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!has(e / 2, 8 * j + e % 2)) x[j][e] = 0.0f;
  }
};

// 1 - tanh(y)^2, computed without the cancellation where tanh(y) is close to 1.
__device__ __forceinline__ float tanh_slope(float y, float tanh) {
  const float shrunk = ex2(-2.0f * kLog2e * fabsf(y)), sum = 1.0f + shrunk;
  return fabsf(y) > 1.0f ? 4.0f * shrunk * rcp(sum * sum) : fmaf(-tanh, tanh, 1.0f);
}

template <class Config>
struct Weights {
  static constexpr int kNTiles = Config::kNTiles;
  using Fragments = uint32_t[Config::kColumnSteps][4];  // of A, 16 bits per element
  using Sums = float[kNTiles][4];

  const float scale, softcap;

  __device__ __forceinline__ explicit Weights(const QfAttnParams& p) : scale(p.scale), softcap(p.softcap) {}

  // S becomes P, except with a softcap: finish() computes P then. Masking is left to finish(), too.
  template <class Statistics>
  __device__ __forceinline__ void take(Sums& S, const Statistics& of) const {
    if (caps()) return;
    const float factor = scale * kLog2e;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const auto minus_lse = of.minus_lse(j);
#pragma unroll
      for (int e = 0; e < 4; ++e) S[j][e] = ex2(fmaf(S[j][e], factor, minus_lse(e)));
    }
    uint32_t bits[4 * kNTiles];
#pragma unroll
    for (int i = 0; i < 4 * kNTiles; ++i) bits[i] = float_to_bits(S[i / 4][i % 4]);
    compute_before(bits);  // ptxas would move the exponentials after the wait for dP
  }
  // P and dS, rounded, from P (with a softcap: from S) and dP, with zeros for what rows do not see. ptxas requires all
  // MMAs to be complete before fragments of A are written, so both are rounded here.
  template <class Statistics>
  __device__ __forceinline__ void finish(Sums& S, Sums& dP, Fragments& P, Fragments& dS, const Statistics& of,
                                         const WorkTile<Config>& work, int column0, bool whole) const {
    if (caps()) take_capped(S, dP, of);
    if (unlikely(!whole)) MetColumns(work, column0).keep(S);
    round(S, P);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const auto delta = of.delta(j);
#pragma unroll
      for (int e = 0; e < 4; ++e) dP[j][e] = S[j][e] * (caps() || Statistics::kPreset ? dP[j][e] : dP[j][e] - delta(e));
    }
    if (unlikely(!whole)) MetColumns(work, column0).keep(dP);  // it may be anything where P is zero
    round(dP, dS);
  }

  // For a consumer that has S but not dP: P, rounded, with zeros for what rows do not see, and P times the slope of the
  // softcap.
  template <class Statistics>
  __device__ __forceinline__ void take_alone(Sums& S, Fragments& P, Fragments& sloped, const Statistics& of,
                                             const WorkTile<Config>& work, int column0, bool whole) const {
    if (caps()) {
      const float inner = scale / softcap, factor = softcap * kLog2e;
      const MetColumns met(work, column0);
#pragma unroll
      for (int step = 0; step < Config::kColumnSteps; ++step) {  // 16 columns at a time, to save registers
        float weight[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = 2 * step + i;
          const auto minus_lse = of.minus_lse(j);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float y = S[j][e] * inner, tanh = tanh_of_any(y);
            const float x = ex2(fmaf(tanh, factor, minus_lse(e)));
            weight[i][e] = whole || met.has(e / 2, 8 * j + e % 2) ? x : 0.0f;
            S[j][e] = weight[i][e] * tanh_slope(y, tanh);
          }
        }
#pragma unroll
        for (int word = 0; word < 4; ++word)
          P[step][word] = Config::Tensor::pair(weight[word / 2][word % 2 * 2], weight[word / 2][word % 2 * 2 + 1]);
      }
      round(S, sloped);
    } else {
      take(S, of);
      if (unlikely(!whole)) MetColumns(work, column0).keep(S);
      round(S, P);
      round(S, sloped);
    }
  }
  // For the consumer that has dP - delta and the rounded, sloped P: dP becomes dS.
  __device__ __forceinline__ void gradients_alone(Sums& dP, const Fragments& sloped, Fragments& dS,
                                                  const WorkTile<Config>& work, int column0, bool whole) const {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t word = sloped[j / 2][j % 2 * 2 + e / 2];
        dP[j][e] *= e % 2 ? Config::Tensor::high(word) : Config::Tensor::low(word);
      }
    if (unlikely(!whole)) MetColumns(work, column0).keep(dP);  // it may be anything where P is zero
    round(dP, dS);
  }

 private:
  __device__ __forceinline__ bool caps() const { return !Config::kPlain && softcap != 0.0f; }

  __device__ static __forceinline__ void round(const Sums& x, Fragments& rounded) {
#pragma unroll
    for (int word = 0; word < Config::kColumnSteps * 4; ++word) {
      const int j = word / 4 * 2 + word % 4 / 2, e = word % 2 * 2;
      rounded[word / 4][word % 4] = Config::Tensor::pair(x[j][e], x[j][e + 1]);
    }
  }
  // S becomes P, and dP what P is multiplied by: (dP - delta) times the slope of the cap.
  template <class Statistics>
  __device__ __forceinline__ void take_capped(Sums& S, Sums& dP, const Statistics& of) const {
    const float inner = scale / softcap, factor = softcap * kLog2e;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const auto minus_lse = of.minus_lse(j);
      const auto delta = of.delta(j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float y = S[j][e] * inner, tanh = tanh_of_any(y);
        S[j][e] = ex2(fmaf(tanh, factor, minus_lse(e)));
        dP[j][e] = (Statistics::kPreset ? dP[j][e] : dP[j][e] - delta(e)) * tanh_slope(y, tanh);
      }
    }
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
