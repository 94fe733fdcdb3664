// What a consumer of `sm90_fwd` computes, for its 64 rows: S = Q Kt, weights, O += P V, in 16 bits with float32 sums.
// attn/wgmma/consumer.cuh says when.
#pragma once

#include "attn/mma/state.cuh"
#include "attn/tile_load.cuh"
#include "attn/wgmma/output.cuh"
#include "attn/wgmma/scores.cuh"
#include "attn/wgmma/shared.cuh"
#include "attn/wgmma/softmax.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90 {

// A lane's weights of a row and tile may add up to this before the row's reference must move: float16 holds it.
constexpr float kMostWeight = 16384.0f;
static_assert(kBlockN / 4 * (1 << int(kSlack)) <= kMostWeight, "a reference that stays was found to suffice");

// kPlain: scales_plainly().
template <bool kPlain>
struct Math {
  using Params = QfAttnParams;
  using Keys = AlongRows<KTile>;
  using Values = AlongColumns<VTile>;
  static constexpr bool kRuns = false;  // of steady tiles: the tensor cores bound, and registers are scarce

  const QfAttnParams& p;
  const Shared& s;
  const float factor;
  float O[1][kOTiles][4], S[1][kNTiles][4];
  uint32_t P[kBlockN / 16][4];
  Rows rows;
  TileSums sums;     // of this tile's weights
  float rescale[2];  // of outputs,
  bool moved;        // where references moved
  bool outgrown;     // scores of this tile outgrew references: to be computed again
  // Need no maxima be looked for in the next tile? Not once every row has a reference: scores seldom outgrow it by
  // much, and where they do the sums tell.
  bool calm;
  bool sees_few;  // keys, some row

  __device__ __forceinline__ Math(const Params& params, const Shared& shared)
      : p(params), s(shared), factor(score_factor(p.scale, p.softcap)) {}

  __device__ __forceinline__ void start_scores(const AlongRows<QTile>& q, const Keys& k) {
    hold(S[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) Wgmma<Element, kBlockN>::multiply(S[0], q.step(i), k.step(i), i > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_scores() { hold(S[0]); }
  __device__ __forceinline__ void start_outputs(const Values& v) {
    hold(O[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) Wgmma<Element, kHeadDim>::template multiply<true>(O[0], P[i], v.step(i));
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_outputs() { hold(O[0]); }

  __device__ static __forceinline__ void note(const Params&, Record&) {}
  __device__ __forceinline__ void foresee(const Record&) {}
  __device__ __forceinline__ void foresee_store(const Record&) {}

  // An item begins.
  __device__ __forceinline__ void begin(const Record& record) {
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][j][e] = 0.0f;
    rows = Rows();
    // What every row of the block sees is enough, in all items but a few.
    sees_few = kKeepsRemainders && record.full.end - record.full.begin < kFewKeys && few(record);
  }
  template <bool>
  __device__ __forceinline__ void fetch() {}
  __device__ __forceinline__ void round() {}  // close() does
  static __device__ __forceinline__ void set_up(const Shared&) {}

  // The scores of an item's first tile become weights, and these P. release(): K is no longer read. await_v(): returns
  // the stage of their V, once it is there.
  template <class Release, class AwaitV>
  __device__ __forceinline__ void open(const Record& record, int key0, bool whole, int, Release release,
                                       AwaitV await_v) {
    release();
    show(record, key0, whole);
    move();
    calm = kPlain && rows.settled();
    sums = take_weights();
    rows.add(sums);
    round_weights(await_v);
  }
  // Those of another become weights,
  __device__ __forceinline__ void weigh(const Record& record, int key0, bool whole, int) {
    moved = false;
    if (!calm || !whole) {
      show(record, key0, whole);
      if (!calm) {
        moved = move();
        calm = kPlain && !moved && rows.settled();
      }
    }
    sums = take_weights();
    outgrown = kPlain && __any_sync(0xffffffffu, fmaxf(sums.of[0], sums.of[1]) > kMostWeight);
    // The sums are never negative. Asking keeps the weights, and all that leads to them, before the wait that follows,
    // where ptxas would not leave them.
    if (kPlain ? outgrown && __any_sync(0xffffffffu, rows.l[0] < 0.0f)
               : __any_sync(0xffffffffu, sums.of[0] + sums.of[1] < 0.0f))
      __trap();
  }
  // and, once the product of the tile before is done, P. left: tiles, this one included.
  template <class Release, class AwaitV>
  __device__ __forceinline__ void close(const Record& record, int key0, bool whole, int q_stage, int k_stage, int,
                                        Release release, AwaitV await_v) {
    if (outgrown) recover(record, key0, whole, q_stage, k_stage);
    rows.add(sums);
    release();
    if (moved) rescale_outputs(O, rescale);
    round_weights(await_v);
  }
  __device__ __forceinline__ void store(const Record& record, int q_stage, bool aligned) {
    char* const s_rows = s.q + q_stage * QTile::kBytes + warp_row() * QTile::kRowBytes;
    finish<kOutThroughQ ? QTile::kPanelBytes : 0>(
        p, record, O, rows, s_rows, warp_row(), lane_of(), aligned, 1.0f, rows.l, [](int) { return 0.0f; },
        [&](int key, int d) {
          const int kv_head = record.h / (p.q_heads / p.kv_heads);
          const HeadRows<Element> v(p.kv.v, record.b, record.seq.k0, kv_head, 0, 0, false);
          return to_float(v.row(key)[d]);
        });
    if (kOutThroughQ) fence_proxy_async();  // what went through q's stage, before the copy engine fills it again
  }

 private:
  __device__ __forceinline__ void recover(const Record& record, int key0, bool whole, int q_stage, int k_stage) {
    outputs_aside(Aside::kSave);
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][j][e] = 0.0f;
    scores_again<Tensor>(S, s, q_stage, k_stage);
    show(record, key0, whole);
    moved = move();
    calm = false;
    sums = take_weights();
    outputs_aside(Aside::kRestore);
  }
  template <class AwaitV>
  __device__ __forceinline__ void round_weights(AwaitV await_v) {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) weights_of(P[i], S, i);
    if (!kKeepsRemainders || !sees_few) return;
    const Values v = Values(s.v).later(await_v());  // what rounding took off the weights, 16 keys at a time
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) {
      uint32_t a[4];
      weights_of<Remainder>(a, S, i);
      hold(O[0]);
      wgmma_fence();
      Wgmma<Element, kHeadDim>::template multiply<true>(O[0], a, v.step(i));
      wgmma_commit();
      wgmma_wait<0>();
      hold(O[0]);
    }
  }
  enum class Aside { kSave, kRestore };
  __device__ __forceinline__ void outputs_aside(Aside what) {
    if (kAsideBytes == 0) return;
    float* const s_own = reinterpret_cast<float*>(s.aside) + fresh_tid() - kGroupThreads;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s_value = s_own[(4 * j + e) * (kConsumers * kGroupThreads)];
        if (what == Aside::kSave)
          s_value = O[0][j][e];
        else
          O[0][j][e] = s_value;
      }
  }
  // Scores as the rows see them.
  __device__ __forceinline__ void show(const Record& record, int key0, bool whole) {
    if (!kPlain) scale_scores(S, p.scale, p.softcap);
    if (!whole) mask_tile(S, tile_mask(record, key0));
  }
  __device__ __forceinline__ bool move() {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = max_of_quad(largest_score(S, h, 0, kNTiles)) * factor;
    return move_reference(largest, rows, rescale);
  }
  // S becomes weights; returns their sums.
  __device__ __forceinline__ TileSums take_weights() {
    const float shift[2] = {-reference_of(rows.m[0]), -reference_of(rows.m[1])};
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S[0][j][e] = ex2(fmaf(S[0][j][e], factor, shift[e / 2]));
        sum[e] += S[0][j][e];
      }
    return {{sum[0] + sum[1], sum[2] + sum[3]}};
  }
  // Does a row of this consumer see few keys? Their number is concave in the row: least in the first or the last.
  __device__ __forceinline__ bool few(const Record& record) {
    const int first = record.row0 + consumer_of() * kGroupRows, last = min(first + kGroupRows, record.seq.len_q) - 1;
    const auto count = [&](int i) { return record.mask.visible(i).end - record.mask.visible(i).begin; };
    return first <= last && min(count(first), count(last)) < kFewKeys;
  }
};

}  // namespace sm90
}  // namespace qf
