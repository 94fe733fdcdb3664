// Scores policy: S = Q K^T of int8, exact in int32, and from S to weights. No barrier is waited for here (consumer.cuh
// does that).
//
// Base-2 scores are slope * S with slope = |scale| log2(e) q_scale k_scale: q has one scale per row, K one per
// kKeyGroup keys. S is converted to float by adding the bits of 1.5 * 2^23 (attn/mma/int8.cuh), an addition where a
// conversion would take four times as long; the offset is subtracted again, exactly, together with the reference:
//   P = 2^(slope (S + kMagic) - (slope kMagic + m_ref))
#pragma once

#include "attn/mma/int8.cuh"
#include "attn/wgmma/recompute.cuh"
#include "attn/wgmma/softcap.cuh"
#include "attn/wgmma/weights_16bit.cuh"
#include "ptx/opaque.cuh"
#include "ptx/uniform.cuh"
#include "ptx/wgmma.cuh"
#include "quant/sm90/quantized.h"

namespace qf {
namespace wgmma {

// Fields of a work tile for kernels with INT8 scores.
struct Int8Facts {
  int64_t head;                       // of K and V, among those of all sequences
  int64_t row;                        // the work tile's first, among those of all heads
  int64_t k_scale_at, v_exponent_at;  // of the head's first key
};

template <int kNTiles>
__device__ __forceinline__ void sum_weights(RowState& rows, const float (&S)[1][kNTiles][4]) {
  float sum[4] = {};
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += S[0][j][e];
  rows.sums[0] = sum[0] + sum[1], rows.sums[1] = sum[2] + sum[3];
}

// kPlain: scales_plainly().
template <class Config_, bool kPlain>
struct Int8Scores {
  using Config = Config_;
  using Params = QuantizedProblem;
  using Work = WorkTile<Config>;
  static constexpr int kNTiles = Config::kNTiles;
  static constexpr int kKeyGroup = kKeptKeyGroup, kParts = Config::kBlockN / kKeyGroup;  // keys that share a scale
  static constexpr bool kReadsKeys = true;                                               // to find nonfinite keys
  static constexpr bool kSteadyTiles = kPlain && Config::kSteadyTiles;
  static constexpr int kScanned = 4;  // scales that a lane prefetches

  const QuantizedProblem& a;
  const QfAttnParams& p;
  const SharedMemory<Config>& s;
  float S[1][kNTiles][4];       // scores as floats, then weights
  int32_t dots[1][kNTiles][4];  // as integers
  float q_slope[2];             // of the lane's rows: slopes without K's scale
  const float* g_k_scale;       // of the head's keys
  float k_scale[kParts];        // of this tile
  int group, last_group;        // of keys: the next group whose scale is loaded, the last that exists
  float q_scales[2];            // this lane's share of the scales of the consumer's rows,
  float k_scales[kScanned];     // and of keys: for the largest slope of the work tile
  int k_nonfinite;              // not 0: some keys are nonfinite
  // All keys are finite, no V has an exponent, and no slope is so large that subtracting kMagic would be inexact: the
  // same for all warps of a consumer.
  int steady;
  int settled;  // every row has a reference: no search for maxima

  __device__ __forceinline__ Int8Scores(const Params& params, const SharedMemory<Config>& shared)
      : a(params), p(params.attn), s(shared) {
    last_group = opaque((p.k_len - 1) / kKeyGroup);
  }

  __device__ __forceinline__ void start(const AlongRows<typename Config::QTile>& q,
                                        const AlongRows<typename Config::KTile>& k) {
    hold(dots[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 32; ++i)
      WgmmaS8<Config::kBlockN>::multiply(dots[0], q.step(i), k.step(i), i > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_sums() { hold(dots[0]); }

  __device__ static __forceinline__ void describe(const Params& a, Work& work) {
    const QfAttnParams& p = a.attn;
    const int64_t head = int64_t(work.b) * p.kv_heads + work.kv_head;
    work.facts.head = head;
    work.facts.row = (int64_t(work.b) * p.q_heads + work.h) * p.q_len + work.row0;
    work.facts.k_scale_at = head * ((p.k_len + kKeyGroup - 1) / kKeyGroup);
    work.facts.v_exponent_at = head * ((p.k_len + Config::kExponentKeys - 1) / Config::kExponentKeys);
  }
  // Prefetches what begin() and the first tile need.
  __device__ __forceinline__ void prefetch(const Work& work) {
    k_nonfinite = a.kv.k_nonfinite[work.facts.head + zero_of_lane()];
    const float* const g_q_scale = a.q_scale + work.facts.row;
    const int row = warp_row() + lane_index() / 4;
    const int group_row = consumer_index() * kWarpgroupRows + lane_index();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q_slope[h] = row + 8 * h < work.rows ? g_q_scale[row + 8 * h] : 0.0f;
      q_scales[h] = group_row + 32 * h < work.rows ? g_q_scale[group_row + 32 * h] : 0.0f;
    }
    group = work.keys.begin / kKeyGroup + zero_of_lane();
    g_k_scale = opaque_global(a.kv.k_scale + work.facts.k_scale_at);
    fetch<false>();
#pragma unroll
    for (int i = 0; i < kScanned; ++i) k_scales[i] = scale_of_group(work, lane_index() + 32 * i);
  }
  template <class Weights>
  __device__ __forceinline__ void begin(const Work& work, const Weights& weights) {
    k_nonfinite = warp_uniform(k_nonfinite);
    float top = k_scales[0];
#pragma unroll
    for (int i = 1; i < kScanned; ++i) top = fmaxf(top, k_scales[i]);
#pragma unroll 4
    for (int i = lane_index() + 32 * kScanned; Config::exponents_from(work.keys.begin) + i * kKeyGroup < work.keys.end;
         i += 32)
      top = fmaxf(top, scale_of_group(work, i));
    const float factor = fabsf(p.scale) * kLog2e;
#pragma unroll
    for (int h = 0; h < 2; ++h) q_slope[h] *= factor;
    const float steepest = slope_of(max_of_warp(fmaxf(q_scales[0], q_scales[1])) * factor, max_of_warp(top));
    steady = opaque(int(kPlain && k_nonfinite == 0 && !weights.has_exponents() && !(steepest > kSteep)));
    settled = false;
  }
  // Loads the scales of the next tile's keys. kWhole: all of them exist.
  template <bool kWhole>
  __device__ __forceinline__ void fetch() {
    const float* const g_scales = g_k_scale + group;
    k_scale[0] = g_scales[0];
#pragma unroll
    for (int c = 1; c < kParts; ++c) k_scale[c] = kWhole ? g_scales[c] : g_k_scale[min(group + c, last_group)];
    group += kParts;
  }

  // How many of the next tiles are steady: no search for a reference, no masking, nothing rare is due. left: remaining
  // tiles, whole: whole tiles. The last tile was a whole one, so every row has a reference; or it is NaN, and needs
  // none.
  template <class Weights>
  __device__ __forceinline__ int steady_tiles(int left, int whole, const Weights& weights) const {
    return steady ? weights.steady_tiles(left, min(left, whole)) : 0;
  }

  template <class Weights>
  __device__ __forceinline__ void weigh_first(const Work& work, int key0, bool whole, int k_stage, RowState& rows,
                                              Weights& weights) {
    weigh(work, key0, whole, k_stage, rows, weights);
    // Scores so large that a rounded reference may be far from them. References for E4M3 were moved already.
    if (!Weights::kNormalises && unlikely(__any_sync(0xffffffffu, weights.too_large(rows)))) {
      rows.moved = false;
      normalise(rows, Weights::kMostSum);
    }
    rows.moved = false;
  }
  // Turns any tile's scores into weights.
  template <class Weights>
  __device__ __forceinline__ void weigh(const Work& work, int key0, bool whole, int k_stage, RowState& rows,
                                        Weights& weights) {
    rows.moved = false;
    if (kPlain && !kSteadyTiles && steady && settled && whole) {
      Half half = weigh_first_half(rows, weights);
      weigh_rest<false>(half, rows, weights);
      return;
    }
    const Slopes slopes = slopes_of_tile();
    weights.begin_tile(key0);
    to_floats<true>(S, dots);
    take_visible_weights(work, key0, whole, k_stage, slopes, !settled, rows, weights.exponent());
    settled = settled || rows.settled();
    sum_weights(rows, S);
    if (Weights::kNormalises && rows.moved) normalise(rows, Weights::kMostSum);
  }
  // A tile whose weights are too large for P: recomputed from its scores, relative to a reference that moves.
  template <class Weights>
  __device__ __forceinline__ void weigh_again(const Work& work, int key0, bool whole, int q_stage, int k_stage,
                                              RowState& rows, Weights& weights) {
    rows.moved = false;
    start_with(dots, 0);
    recompute_scores<Tensor8<90>>(dots, s, q_stage, k_stage);
    to_floats<true>(S, dots);
    take_visible_weights(work, key0, whole, k_stage, slopes_of_tile(), true, rows, weights.exponent());
    sum_weights(rows, S);
    normalise(rows, Weights::kMostSum);
  }

  // A steady tile, in two halves: between them is the wait for the MMA that still reads P. The second half also rounds
  // into P.
  struct Slopes {
    float of[2][kParts];  // [row][group of keys]
  };
  struct Half {
    Slopes slopes;
    float shift[2][kParts], sum[4];
  };
  static constexpr int kChunks = 8;  // of a tile; an exponential takes 8 cycles, so other work is interleaved

  template <class Weights>
  __device__ __forceinline__ Half weigh_first_half(const RowState& rows, const Weights&) {
    Half half = {slopes_of_tile(), {}, {}};
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < kParts; ++c) half.shift[h][c] = fmaf(-kMagic, half.slopes.of[h][c], -rows.m[h]);
    shift_scores<Weights>(half, 0);
#pragma unroll
    for (int chunk = 0; chunk <= kChunks / 2; ++chunk) take_chunk<Weights>(half, chunk);
    return half;
  }
  template <class Weights>
  __device__ __forceinline__ void weigh_second_half(Half& half, RowState& rows, Weights& weights) {
    weigh_rest<true>(half, rows, weights);
  }

 private:
  template <bool kRounds, class Weights>
  __device__ __forceinline__ void weigh_rest(Half& half, RowState& rows, Weights& weights) {
    if (kRounds) round_chunk(weights, 0);
#pragma unroll
    for (int chunk = kChunks / 2 + 1; chunk < kChunks; ++chunk) {
      take_chunk<Weights>(half, chunk);
      const int late = chunk - kChunks / 2;
      if (kRounds) round_chunk(weights, 2 * late - 1);
      if (kRounds) round_chunk(weights, 2 * late);
    }
    if (kRounds) round_chunk(weights, kChunks - 1);
    if (Weights::kSumsAsMultiplied) return;
    add_chunk<Weights>(half, kChunks - 1);
    rows.sums[0] = half.sum[0] + half.sum[1], rows.sums[1] = half.sum[2] + half.sum[3];
  }
  template <class Weights, class F>
  __device__ static __forceinline__ void for_chunk(int chunk, F f) {
    constexpr int kWords = Weights::kWords / kChunks;
#pragma unroll
    for (int word = chunk * kWords; word < (chunk + 1) * kWords; ++word)
#pragma unroll
      for (int i = 0; i < Weights::kPerWord; ++i) {
        const WeightIndex at = Weights::index(word, i);
        f(at.j, at.e);
      }
  }
  template <class Weights>
  __device__ __forceinline__ void shift_scores(const Half& half, int chunk) {
    for_chunk<Weights>(chunk, [&](int j, int e) {
      const int c = j * kParts / kNTiles;
      S[0][j][e] =
          fmaf(bits_to_float(uint32_t(dots[0][j][e] + kMagicBits)), half.slopes.of[e / 2][c], half.shift[e / 2][c]);
    });
  }
  template <class Weights>
  __device__ __forceinline__ void add_chunk(Half& half, int chunk) {
    for_chunk<Weights>(chunk, [&](int j, int e) { half.sum[e] += S[0][j][e]; });
  }
  // The exponentials of one chunk, the arguments of the next, the sums of the previous one.
  template <class Weights>
  __device__ __forceinline__ void take_chunk(Half& half, int chunk) {
    if (chunk + 1 < kChunks) shift_scores<Weights>(half, chunk + 1);
    for_chunk<Weights>(chunk, [&](int j, int e) { S[0][j][e] = ex2(S[0][j][e]); });
    if (!Weights::kSumsAsMultiplied && chunk > 0) add_chunk<Weights>(half, chunk - 1);
  }
  template <class Weights>
  __device__ __forceinline__ void round_chunk(Weights& weights, int chunk) {
    constexpr int kWords = Weights::kWords / kChunks;
#pragma unroll
    for (int word = chunk * kWords; word < (chunk + 1) * kWords; ++word) weights.round(S, word);
  }

  // The scale of a group among those that the work tile sees, counted from the start of a full tile of V; 0 past the
  // last.
  __device__ __forceinline__ float scale_of_group(const Work& work, int i) const {
    const int key = Config::exponents_from(work.keys.begin) + i * kKeyGroup;
    return key < work.keys.end ? g_k_scale[key / kKeyGroup] : 0.0f;
  }
  __device__ __forceinline__ Slopes slopes_of_tile() const {
    Slopes slopes;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        // Few enough bits for its product with kMagic to be exact, and for the offset to cancel exactly.
        const float slope = slope_of(q_slope[h], k_scale[c]);
        slopes.of[h][c] = bits_to_float(float_to_bits(slope) & ~0xfu);
      }
    return slopes;
  }
  // Makes S the scores as the rows see them. Returns the slopes that remain to be applied.
  __device__ __forceinline__ Slopes make_visible(const Work& work, int key0, bool whole, int k_stage, Slopes slopes) {
    using KTile = typename Config::KTile;
    if (unlikely(k_nonfinite)) spoil_nonfinite<KTile::kChunks>(S, s.k + k_stage * KTile::kBytes, lane_index() % 4 * 2);
    if (!kPlain) {  // base-2 scores, with what smoothing took off; scale may be negative or 0
      const float* const g_dot_mean = a.q_dot_mean + work.facts.row + warp_row() + lane_index() / 4;
      const float dot_mean[2] = {g_dot_mean[0] * p.scale * kLog2e, g_dot_mean[8] * p.scale * kLog2e};
      const float sign = p.scale < 0.0f ? -1.0f : 1.0f, cap = p.softcap * kLog2e;
#pragma unroll
      for (int j = 0; j < kNTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          S[0][j][e] = fmaf(S[0][j][e], sign * slopes.of[e / 2][j * kParts / kNTiles], dot_mean[e / 2]);
      if (cap > 0.0f) take_tanh<2>(S, 1.0f / cap, suits_mixed<2>(S, 1.0f / cap, softens_coarsely(p.softcap)));
      const bool fuses = fuses_cap(p.softcap);
      if (unlikely(cap > 0.0f && !fuses)) scale_scores(S, p.softcap, 0.0f);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < kParts; ++c) slopes.of[h][c] = fuses ? cap : 1.0f;
    }
    if (unlikely(!whole)) mask_tile(S, visible_keys(work, key0));
    return slopes;
  }
  // S becomes the visible weights, times 2^exponent. search: first looks for the rows' largest scores, which may move
  // references.
  __device__ __forceinline__ void take_visible_weights(const Work& work, int key0, bool whole, int k_stage,
                                                       const Slopes& of_tile, bool search, RowState& rows,
                                                       float exponent) {
    const Slopes slopes = make_visible(work, key0, whole, k_stage, of_tile);
    if (search) rows.moved = find_reference(slopes, rows, exponent) || rows.moved;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float shift = exponent - reference_of(rows.m[e / 2]);
        S[0][j][e] = ex2(fmaf(S[0][j][e], slopes.of[e / 2][j * kParts / kNTiles], shift));
      }
  }
  __device__ __forceinline__ bool find_reference(const Slopes& slopes, RowState& rows, float exponent) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -infinity();
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        constexpr int kRun = kNTiles / kParts;
        most = fmaxf(most, fmaf(largest_score(S, h, c * kRun, (c + 1) * kRun), slopes.of[h][c], exponent));
      }
      largest[h] = ceilf(max_of_quad(most));  // an integer: references move by powers of two
    }
    return rows.move(largest);
  }
  // Moves references that just rose, or are too small, so that a row's largest per-lane sum of weights lies in
  // 64 .. 128, but never below where they were: weights seldom grow from there to 256 and more, and those far below the
  // sum, down to 2^-13 of it, are still normal numbers in E4M3. With `up` = floor(log2(sum)) - 6, read from the
  // exponent bits: m_ref += up, and all that is relative to it is multiplied by 2^-up.
  __device__ __forceinline__ void normalise(RowState& rows, float most_sum) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = max_of_quad(rows.sums[h]);
      const int rise = rows.moved ? 127 - int(float_to_bits(rows.rescale[h]) >> 23) : 0;  // of the reference, just now
      const bool moves = (rise > 0 && most > 0.0f) || most >= most_sum;                   // not if all is masked so far
      const int up = moves && most < infinity() ? max(int(float_to_bits(most) >> 23) - 127 - 6, -rise) : 0;
      const float factor = bits_to_float(uint32_t(127 - up) << 23);
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) S[0][j][2 * h] *= factor, S[0][j][2 * h + 1] *= factor;
      rows.sums[h] *= factor;
      rows.m[h] += float(up);
      rows.l[h] *= factor;
      rows.rescale[h] = rows.moved ? rows.rescale[h] * factor : factor;
    }
    rows.moved = true;
  }
};

}  // namespace wgmma
}  // namespace qf
