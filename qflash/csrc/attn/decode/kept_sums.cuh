// The accumulators of one warp over its part of the keys of one unit, on KV from quantize_kv: scores are exact
// integers, as on INT8 pages, with one scale per 64 keys; from there on, softmax and P V are those of 16 bits.
#pragma once

#include "attn/decode/attend.cuh"
#include "attn/decode/int8_product.cuh"
#include "attn/decode/kept_config.cuh"
#include "attn/decode/scores.cuh"
#include "attn/mma/int8.cuh"

namespace qf {
namespace decode {

template <class Config>
struct KeptSums : WarpSums<Config> {
  using Queries = Int8Queries<Config>;
  static constexpr int kNTiles = Config::kStep / 8;
  using Scores = float[1][kNTiles][4];

  __device__ static __forceinline__ Queries queries(const QfAttnParams& p, const char* s_queries, int row0, int lane) {
    return Queries(p, s_queries, row0, lane);
  }

  // A tile of keys from key0 on. kPlain: every row sees all of them, they are finite, and scores are a positive factor
  // times q . k.
  template <bool kPlain, class Source>
  __device__ __forceinline__ void attend(const QfAttnParams& p, const Queries& q, const Unit<Config>& unit, int key0,
                                         Source& source) {
    const int thread = thread_of<Config>(), lane = thread % 32, column = lane % 4 * 2;
    const int warp = thread / 32 % Config::kTeamWarps;
    const int row0 = warp / Config::kKeyWarps * 16, first = warp % Config::kKeyWarps * Config::kWarpKeys;
    const WarpScales scales(p, unit.part, key0 + first);  // in flight while K is waited for
    const char* const s_k = source.wait_k();
    char* s_v = nullptr;
#pragma unroll 1
    for (int step = 0; step < Config::kWarpKeys; step += Config::kStep) {
      int32_t dots[1][kNTiles][4];
      start_with(dots, kMagicBits);
      qk_mma<Config>(dots, q, s_k, first + step, lane);
      Scores S;
      const float scale = scales.of(step);
      float slopes[2] = {q.slope[0] * scale, q.slope[1] * scale};
      to_integers(S, dots);
      if constexpr (!kPlain) {
        finish_scores(S, slopes, q.bias, p.softcap);
        if (unit.spoiled)
          spoil_nonfinite<Config::KeyTile::kChunks>(S, s_k + (first + step) * Config::KeyTile::kRowBytes, column);
        mask_scores(p, unit.seen.mask, S, row0 + lane / 4, key0 + first + step + column);
        slopes[0] = slopes[1] = 1.0f;
      }
      online_softmax<1>(S, [&](int r, int) { return slopes[r]; }, [](int, int) { return 0.0f; }, this->rows, this->O);
      if (step == 0) {
        s_v = source.wait_v();
        if constexpr (!kPlain) {
          clear_unseen<Config>(s_v, key0, unit.seen.any, unit.seen.all);
          source.written();
          source.meet_team();  // the zeros are in place
        }
      }
      pv_mma<Config, Rounded>(this->O, this->rows[0], S, s_v, first + step, lane);
    }
  }

  // Without softcap all scores of a row lack q . k_mean, which is added to its reference here.
  __device__ static __forceinline__ Merged finished(const QfAttnParams& p, int row, Merged merged,
                                                    const char* s_queries) {
    if (p.softcap == 0.0f && wants_dot_k_mean(p))
      merged.m += query_dot_k_mean<Config>(s_queries, row) * (p.scale * kLog2e);
    return merged;
  }

 private:
  // Scales of the keys that a warp takes of one tile: at most 128, and tiles begin at multiples of their size.
  struct WarpScales {
    static constexpr int kGroups = Config::kWarpKeys > kKeptKeyGroup ? 2 : 1;
    static_assert(Config::kWarpKeys <= kGroups * kKeptKeyGroup && kKeptKeyGroup % Config::kStep == 0, "");
    float each[kGroups];

    __device__ __forceinline__ WarpScales(const QfAttnParams& p, const Part& part, int key) {
      const float* const g_scales =
          p.kv.k_scales.scale + part.b * p.kv.k_scales.stride_b + part.kv_head * p.kv.k_scales.stride_h;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) each[i] = g_scales[min(key + i * kKeptKeyGroup, p.k_len - 1) / kKeptKeyGroup];
    }
    __device__ __forceinline__ float of(int step) const {
      return kGroups > 1 && step >= kKeptKeyGroup ? each[kGroups - 1] : each[0];
    }
  };

  // Converts accumulators that started at kMagicBits.
  __device__ static __forceinline__ void to_integers(Scores& S, const int32_t (&dots)[1][kNTiles][4]) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][j][e] = bits_to_float(uint32_t(dots[0][j][e])) - kMagic;
  }
};

template <class Config>
struct SumsOf<Config, false, true> {
  using Type = KeptSums<Config>;
};

}  // namespace decode
}  // namespace qf
