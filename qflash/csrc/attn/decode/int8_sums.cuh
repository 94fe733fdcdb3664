// The accumulators of one warp over its part of the keys of one unit, on INT8 pages.
//
// The weight of a key that multiplies V includes V's scale: w_j = 2^(t_j - m) s_j, rounded to float16, where t is the
// base-2 score and s V's scale of the key. Scales differ from key to key by any factor (the first tokens of a text
// often have large scores and small values), so the reference m, an integer, is that of the products instead of the
// scores: it keeps the largest w_j of a row between float16's smallest numbers and kMostWeight. Single precision sums
// have more range: l, the sum of 2^(t_j - m), may become as large as 1 / s_j, which kMostSum bounds. O is divided by
// that l, and w_j was rounded once, to 2^-11 of itself, so no key costs accuracy because another is larger.
//
// There is no running maximum. Weights are computed with the current reference, and where one of them exceeds
// kMostWeight, which a maximum of packed halves detects, or l exceeds kMostSum, the reference is raised and they are
// recomputed: in the first tile, and rarely afterwards.
#pragma once

#include "attn/decode/attend.cuh"
#include "attn/decode/int8_product.cuh"
#include "attn/decode/scores.cuh"
#include "attn/mma/softmax.cuh"
#include "ptx/max.cuh"

namespace qf {
namespace decode {

constexpr uint32_t kMostWeight = 0x7800u;  // 2^15, as float16
constexpr float kMostSum = 0x1p112f;       // of a lane's weights without V's scales
// A raised reference gives the largest weight this exponent: 2^8 below kMostWeight, and 2^31 above the smallest
// float16.
constexpr float kWeightExponent = 7.0f;
// And 2^(t - m) at most this one. Scales that are not 0 are at least 2^-107: such a weight is still a normal float16.
constexpr float kSumExponent = 96.0f;

// The least integer x with 2^x > scale. 129 for NaN and infinity: only rows that see them use it, and are spoiled by
// them.
__device__ __forceinline__ float exponent_above(float scale) {
  return bits_to_float(0x4b000000u | float_to_bits(scale) >> 23) - (8388608.0f + 126.0f);
}

template <class Config>
struct Int8Sums {
  static constexpr int kNTiles = Config::kStep / 8;
  using Scores = float[1][kNTiles][4];
  using Queries = Int8Queries<Config>;

  __device__ static __forceinline__ Queries queries(const QfAttnParams& p, const char* s_queries, int row0, int lane) {
    return Queries(p, s_queries, row0, lane);
  }

  Int8Products<Config> products;
  float m[2] = {-infinity(), -infinity()};  // -inf: nothing seen yet, so that any score's weight is too large
  float l[2] = {};                          // of this lane's weights

  // A tile of keys from key0 on. kPlain: every row sees all of them, and scores are a factor times q . k.
  template <bool kPlain, class Source>
  __device__ __forceinline__ void attend(const QfAttnParams& p, const Queries& q, const Unit<Config>& unit, int key0,
                                         Source& source) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % Config::kTeamWarps, column = lane % 4 * 2;
    const int row0 = warp / Config::kKeyWarps * 16, first = warp % Config::kKeyWarps * Config::kWarpKeys;
    const char* const s_k = source.wait_k();
    const char* s_v = nullptr;
#pragma unroll 1
    for (int step = 0; step < Config::kWarpKeys; step += Config::kStep) {
      int32_t dots[1][kNTiles][4];
      start_with(dots, kMagicBits);
      qk_mma<Config>(dots, q, s_k, first + step, lane);
      Scores S;
      dequantize(S, dots, source.k_scales() + first + step + column);
      if constexpr (!kPlain) {
        finish_scores(S, q.slope, q.bias, p.softcap);
        mask_scores(p, unit.seen.mask, S, row0 + lane / 4, key0 + first + step + column);
      }
      if (step == 0) s_v = source.wait_v();
      float2 v_scales[kNTiles];
#pragma unroll
      for (int j = 0; j < kNTiles; ++j)
        v_scales[j] = *reinterpret_cast<const float2*>(source.v_scales() + first + step + column + 8 * j);
      uint32_t weights[kNTiles / 2][4];
      weigh<kPlain>(weights, S, q, v_scales);
#pragma unroll
      for (int j = 0; j < kNTiles / 2; ++j) products.add(weights[j], s_v, first + step + 16 * j, lane);
    }
  }

  // Writes eight rows of each warp and kAreaColumns channels to the area: those of pass `pass`, halves of the rows
  // outermost.
  __device__ __forceinline__ void lay_down(const Area<Config>& area, int pass) const {
    constexpr int kColumnPasses = Area<Config>::kColumnPasses;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* const s_row = area.rows + (warp * 8 + lane / 4) * Config::kAreaStride + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2 * kColumnPasses; ++i) {  // registers cannot be indexed
      if (i != pass) continue;
      const int half = i / kColumnPasses, chunk0 = i % kColumnPasses * (Config::kAreaColumns / 16);
#pragma unroll
      for (int c = 0; c < Config::kAreaColumns / 16; ++c)
        *reinterpret_cast<float4*>(s_row + 16 * c) = products.four(chunk0 + c, half);
      const float two = l[half] + __shfl_xor_sync(0xffffffffu, l[half], 1);
      const float sum = two + __shfl_xor_sync(0xffffffffu, two, 2);
      if (lane % 4 == 0) area.sums[warp * 8 + lane / 4] = {m[half], sum, sum, 0.0f};
    }
  }

  // Channels d .. d + 3 of a finished row. Without softcap all scores of a row lack q . k_mean, which is added to its
  // reference here. A nonfinite token has spoiled the rows that see it through its scale.
  __device__ static __forceinline__ void finish(const QfAttnParams& p, const Seen<Config>& seen, const Part& part,
                                                int row, int d, Merged merged, bool out_aligned,
                                                const char* s_queries) {
    if (p.softcap == 0.0f && wants_dot_k_mean(p))
      merged.m += query_dot_k_mean<Config>(s_queries, row) * (p.scale * kLog2e);
    Seen<Config> alike = seen;
    alike.all = seen.any;  // no values of V are to be added
    store_row<typename Config::Element>(p, alike, part, row, d, merged, out_aligned,
                                        [](int) { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
  }

 private:
  // Converts integers that started at kMagicBits and multiplies them by K's scales, from s_scales on.
  __device__ static __forceinline__ void dequantize(Scores& S, const int32_t (&dots)[1][kNTiles][4],
                                                    const float* s_scales) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(s_scales + 8 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S[0][j][e] = (bits_to_float(uint32_t(dots[0][j][e])) - kMagic) * (e % 2 == 0 ? scale.x : scale.y);
    }
  }

  // Base-2 scores are S, times the row's slope where that was left to the exponential.
  template <bool kPlain>
  __device__ static __forceinline__ float slope_of(const Queries& q, int r) {
    return kPlain ? q.slope[r] : 1.0f;
  }

  // weights: 2^(t - m) times V's scales, as A operands; their sums without scales go to l. A key that a row does not
  // see has score -inf and weight 0, whatever V's scale is there.
  template <bool kPlain>
  __device__ __forceinline__ void weigh(uint32_t (&weights)[kNTiles / 2][4], const Scores& S, const Queries& q,
                                        const float2 (&v_scales)[kNTiles]) {
#pragma unroll 1
    for (bool raised = false;; raised = true) {
      float sum[2] = {l[0], l[1]};
#pragma unroll
      for (int j = 0; j < kNTiles; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float w[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float score = S[0][j][2 * r + e];
            const bool unseen = !kPlain && score == -infinity();
            const float weight = unseen ? 0.0f : ex2(fmaf(score, slope_of<kPlain>(q, r), -m[r]));
            sum[r] += weight;
            w[e] = unseen ? 0.0f : weight * (e == 0 ? v_scales[j].x : v_scales[j].y);
          }
          weights[j / 2][j % 2 * 2 + r] = Config::Tensor::pair(w[0], w[1]);
        }
      uint32_t most = 0;
#pragma unroll
      for (int j = 0; j < kNTiles / 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) most = max_f16x2(most, weights[j][i]);
      // Halves above kMostWeight carry into their sign bits, which no weight has set.
      constexpr uint32_t kToSign = 0x8000u - (kMostWeight + 1);
      const bool weighs_too_much = (most + (kToSign << 16 | kToSign)) & 0x80008000u;
      const bool again = weighs_too_much || sum[0] > kMostSum || sum[1] > kMostSum;
      if (raised || !__any_sync(0xffffffffu, again)) {
        l[0] = sum[0], l[1] = sum[1];
        return;
      }
      raise<kPlain>(S, q, v_scales);
    }
  }

  // Raises the reference to what the scores S with these scales require, and rescales O and l.
  template <bool kPlain>
  __device__ __forceinline__ void raise(const Scores& S, const Queries& q, const float2 (&v_scales)[kNTiles]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float wanted = -infinity();
#pragma unroll
      for (int j = 0; j < kNTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = S[0][j][2 * r + e] * slope_of<kPlain>(q, r);
          const float scale = e == 0 ? v_scales[j].x : v_scales[j].y;
          wanted = fmaxf(wanted, score + fmaxf(exponent_above(scale) - kWeightExponent, -kSumExponent));
        }
      const float raised = fmaxf(m[r], ceilf(max_of_quad(wanted))), factor = ex2(m[r] - reference_of(raised));
      m[r] = raised;
      l[r] *= factor;
      products.rescale(r, factor);
    }
  }
};

template <class Config>
struct SumsOf<Config, true, false> {
  using Type = Int8Sums<Config>;
};

}  // namespace decode
}  // namespace qf
