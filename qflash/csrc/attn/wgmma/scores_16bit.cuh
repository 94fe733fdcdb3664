// Scores policy: S = Q K^T in 16 bits with float32 accumulators, and from S to weights. No barrier is waited for here
// (consumer.cuh does that).
#pragma once

#include "attn/wgmma/recompute.cuh"
#include "attn/wgmma/softcap.cuh"
#include "attn/wgmma/softmax.cuh"
#include "ptx/order.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace wgmma {

// kPlain: scales_plainly(), P = 2^(factor S - m_ref) with factor = scale log2(e). Else S is first made tanh(scale S /
// softcap) with factor = softcap log2(e); or the base-2 score itself, for a vast softcap or a scale that is not
// positive.
template <class Config_, bool kPlain>
struct SixteenBitScores {
  using Config = Config_;
  using Params = QfAttnParams;
  using Work = WorkTile<Config>;
  static constexpr int kNTiles = Config::kNTiles;
  static constexpr int kPolynomials = Config::kHeadDim > 128 ? 0 : 2;  // for softcap's tanh (softcap.cuh)
  static constexpr bool kReadsKeys = false;    // except weigh_again(), which ends with warp-wide votes
  static constexpr bool kSteadyTiles = false;  // the tensor cores are the bound, and registers are scarce
  // Limit on a lane's sum of weights of a row and tile before the row's reference must move: float16 can hold it.
  static constexpr float kMostSum = 16384.0f;
  static_assert(Config::kBlockN / 4 * (1 << int(kSlack)) <= kMostSum,
                "weights that left a reference where it was must not count as outgrown");

  const QfAttnParams& p;
  const float factor;
  float S[1][kNTiles][4];
  // Every row has a reference, so the next tile skips the search for maxima: scores seldom outgrow it by much, and if
  // they do, the sums of weights show it. The tile after one that moved a reference is searched, too: rising scores may
  // keep rising.
  bool settled;
  bool outgrown;  // scores of this tile outgrew their references: recompute them

  __device__ __forceinline__ SixteenBitScores(const Params& params, const SharedMemory<Config>&)
      : p(params),
        factor(kPlain                 ? p.scale * kLog2e
               : fuses_cap(p.softcap) ? p.softcap * kLog2e
                                      : 1.0f) {}

  __device__ __forceinline__ void prefetch(const Work&) {}
  template <class Weights>
  __device__ __forceinline__ void begin(const Work&, const Weights&) {}
  template <bool kWhole>
  __device__ __forceinline__ void fetch() {}

  __device__ __forceinline__ void start(const AlongRows<typename Config::QTile>& q,
                                        const AlongRows<typename Config::KTile>& k) {
    hold(S[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 16; ++i)
      Wgmma<typename Config::Element, Config::kBlockN>::multiply(S[0], q.step(i), k.step(i), i > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_sums() { hold(S[0]); }

  // Turns the first tile of a work tile into weights and finds its references.
  template <class Weights>
  __device__ __forceinline__ void weigh_first(const Work& work, int key0, bool whole, int, RowState& rows, Weights&) {
    make_visible(work, key0, whole, mixes_tanh());
    find_reference(rows);
    settled = rows.settled();
    take_weights(rows);
  }
  // Turns another tile into weights.
  template <class Weights>
  __device__ __forceinline__ void weigh(const Work& work, int key0, bool whole, int, RowState& rows, Weights&) {
    rows.moved = false;
    const bool mixed = mixes_tanh();
    if (!kPlain && mixed && settled && whole) {  // tanh and exponential in one pass
      take_capped_weights(rows);
    } else {
      if (!kPlain || !settled || !whole) make_visible(work, key0, whole, mixed);
      if (!settled) {
        rows.moved = find_reference(rows);
        settled = !rows.moved && rows.settled();
      }
      take_weights(rows);
    }
    outgrown = __any_sync(0xffffffffu, fmaxf(rows.sums[0], rows.sums[1]) > kMostSum);
    compute_before_if(outgrown, rows.l[0]);  // ptxas would move the weights after the wait for O
  }
  // A tile whose scores outgrew their reference: q and K are still in shared memory.
  __device__ __forceinline__ void weigh_again(const SharedMemory<Config>& s, const Work& work, int key0, bool whole,
                                              int q_stage, int k_stage, RowState& rows) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][j][e] = 0.0f;
    recompute_scores<typename Config::Tensor>(S, s, q_stage, k_stage);
    make_visible(work, key0, whole, mixes_tanh());
    rows.moved = find_reference(rows);
    settled = false;
    take_weights(rows);
  }

 private:
  __device__ __forceinline__ bool mixes_tanh() const {
    return !kPlain && p.softcap > 0.0f &&
           suits_mixed<kPolynomials>(S, p.scale / p.softcap, softens_coarsely(p.softcap));
  }
  __device__ __forceinline__ void make_visible(const Work& work, int key0, bool whole, bool mixed) {
    if (!kPlain && p.softcap > 0.0f) take_tanh<kPolynomials>(S, p.scale / p.softcap, mixed);
    if (!kPlain && unlikely(!fuses_cap(p.softcap))) scale_scores(S, p.softcap > 0.0f ? p.softcap : p.scale, 0.0f);
    if (!whole) mask_tile(S, visible_keys(work, key0));
  }
  __device__ __forceinline__ bool find_reference(RowState& rows) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = max_of_quad(largest_score(S, h, 0, kNTiles)) * factor;
    return rows.move(largest);
  }
  // S becomes weights, with their sums in rows.sums.
  __device__ __forceinline__ void take_weights(RowState& rows) {
    const float shift[2] = {-reference_of(rows.m[0]), -reference_of(rows.m[1])};
    for_each_weight(rows, [&](float s, int e) { return fmaf(s, factor, shift[e / 2]); });
  }
  // The same in one pass with tanh, c = softcap log2(e): 2^(c tanh(y) - m_ref), where, if no polynomial is used,
  //   c tanh(y) - m_ref = (c - m_ref) - 2c / (1 + e^2y)
  __device__ __forceinline__ void take_capped_weights(RowState& rows) {
    const float slope = p.scale / p.softcap, offset = kPolynomials == 0 ? factor : 0.0f;
    const float shift[2] = {offset - reference_of(rows.m[0]), offset - reference_of(rows.m[1])};
    for_each_weight(rows, [&](float s, int e) {
      if (kPolynomials == 0) return fmaf(-2.0f * factor, rcp(1.0f + ex2(s * (2.0f * kLog2e * slope))), shift[e / 2]);
      return fmaf(tanh_mixed<kPolynomials>(s * slope, e), factor, shift[e / 2]);
    });
  }
  // weight = 2^exponent(score)
  template <class Exponent>
  __device__ __forceinline__ void for_each_weight(RowState& rows, Exponent exponent) {
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S[0][j][e] = ex2(exponent(S[0][j][e], e));
        sum[e] += S[0][j][e];
      }
    rows.sums[0] = sum[0] + sum[1], rows.sums[1] = sum[2] + sum[3];
  }
};

}  // namespace wgmma
}  // namespace qf
