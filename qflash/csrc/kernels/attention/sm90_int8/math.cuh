// What a consumer of `sm90_int8` computes, for its 64 rows: S = Q Kt of integers, weights, O += P V in 16 bits or in
// E4M3. attn/wgmma/consumer.cuh says when.
#pragma once

#include "attn/mma/int8.cuh"
#include "attn/tile_load.cuh"
#include "attn/wgmma/output.cuh"
#include "attn/wgmma/producer.cuh"
#include "attn/wgmma/scores.cuh"
#include "attn/wgmma/shared.cuh"
#include "kernels/attention/sm90_int8/params.h"
#include "kernels/attention/sm90_int8/weights.cuh"
#include "ptx/opaque.cuh"

namespace qf {
namespace sm90 {

// kPlain: scales_plainly().
template <bool kPlain>
struct Math {
  using Params = Quantized;
  using Keys = AlongRows<KTile>;
  using Values = Weights<kFp8>::Values;

  // Steady tiles have a loop of their own; but not where half a tile's exponentials do not last as long as the product
  // of the tile before.
  static constexpr bool kRuns = kPlain && (kFp8 || kHeadDim <= 128);
  static constexpr int kTogether = 1024 / kBlockN;     // tiles whose products 8-bit floats' sums hold well enough
  static constexpr int kScanned = 4;                   // scales that a lane asks for ahead of time
  static constexpr bool kMeanAhead = kHeadDim <= 128;  // V's mean is there before it is needed; takes registers

  const Quantized& a;
  const QfAttnParams& p;
  const Shared& s;
  AlongRows<OnesTile> ones;
  float O[1][kOTiles][4], S[1][kNTiles][4];
  int32_t dots[1][kNTiles][4];  // S, as integers
  Weights<kFp8> P;
  Rows rows;
  TileSums sums;       // of this tile's weights
  float added[1][4];   // sums of weights as they are multiplied, 32 keys a lane, with each product of theirs
  float rounded_l[2];  // those of all tiles
  float saw_lift[2];   // 1 where the row has weights in a tile that is lifted
  float unlift;        // of the tile that is multiplied: weights are as many times too large
  float q_slope[2];    // of the lane's rows: from dots to base-2 scores, K's scale apart
  const float *g_k_scale, *g_v_lift;  // of the sequence's keys in their head
  float q_scales[2];                  // of the consumer's rows, the share of this lane,
  float scales[kScanned];             // of keys in their head, likewise,
  float lifts[kScanned / 2];          // and of values
  float k_scale[kParts], v_lift;      // of this tile
  float rescale[2];                   // of outputs,
  int moved;                          // where references moved
  bool promoted;                      // some outputs are aside
  float v_scale;                      // of the item
  ChannelMean<kFp8> v_mean;           // likewise
  int wild;                           // not 0: some keys are not finite
  bool lifted;                        // some values are far beyond the sample
  int exact;                          // sums before rounding are wanted, too
  int group, last_group;              // of keys: the next to be fetched, the last there is
  // All keys finite, no value lifted, no scale off whose scores references would not come exactly: the same for all
  // warps of a consumer.
  int smooth;
  int calm;  // every row has a reference: maxima need not be looked for

  __device__ __forceinline__ Math(const Params& params, const Shared& shared)
      : a(params), p(params.attn), s(shared), ones(s_ones(shared)) {
    ones.low = __shfl_sync(0xffffffffu, ones.low, 0);
    last_group = opaque((p.k_len - 1) / kKeyGroup);
  }

  __device__ __forceinline__ void start_scores(const AlongRows<QTile>& q, const Keys& k) {
    hold(dots[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) WgmmaS8<kBlockN>::multiply(dots[0], q.step(i), k.step(i), i > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_scores() { hold(dots[0]); }
  __device__ __forceinline__ void start_outputs(const Values& v) {
    hold(O[0]);
    wgmma_fence();
    P.multiply(O[0], added, v, ones);
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_outputs() {
    hold(O[0]);
    if (kFp8) hold(added);
  }
  // All threads, before anything else.
  static __device__ __forceinline__ void set_up(const Shared& s) {
    if constexpr (kFp8) {
      for (int i = threadIdx.x; i < kOnesBytes / 4; i += kThreads) {
        const int row = i / 32, chunk = i % 32 / 4 ^ row;  // of the tile, which is permuted as all are
        reinterpret_cast<uint32_t*>(s_ones(s))[i] = chunk / 2 == row / 2 ? 0x38383838u : 0u;
      }
      fence_proxy_async();  // them, to wgmma
    }
  }

  // What the planning thread finds out for consumers.
  __device__ static __forceinline__ void note(const Params& a, Record& record) {
    const QfAttnParams& p = a.attn;
    KernelFacts& facts = record.facts;
    const int64_t head = int64_t(record.b) * p.kv_heads + record.kv_head;
    facts.head = head;
    facts.row = (int64_t(record.b) * p.q_heads + record.h) * p.q_len + record.row0;
    facts.k_scale_at = head * ((p.k_len + kKeyGroup - 1) / kKeyGroup);
    if (kFp8) facts.v_lift_at = head * ((p.k_len + kLiftKeys - 1) / kLiftKeys);
  }
  // Asks for what begin() and the first tile need, long before.
  __device__ __forceinline__ void foresee(const Record& record) {
    const KernelFacts& facts = record.facts;
    g_k_scale = a.kv.k_scale + facts.k_scale_at;
    if (kFp8) g_v_lift = a.kv.v_exponents + facts.v_lift_at;
    wild = a.kv.k_nonfinite[facts.head + zero_of_lane()];
    const float* const g_q_scale = a.q_scale + facts.row;
    const int row = warp_row() + lane_of() / 4;
    const int group_row = consumer_of() * kGroupRows + lane_of();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q_slope[h] = row + 8 * h < record.rows ? g_q_scale[row + 8 * h] : 0.0f;
      q_scales[h] = group_row + 32 * h < record.rows ? g_q_scale[group_row + 32 * h] : 0.0f;
    }
    group = record.keys.begin / kKeyGroup + zero_of_lane();
    g_k_scale = opaque_global(g_k_scale);
    fetch<false>();
#pragma unroll
    for (int i = 0; i < kScanned; ++i) scales[i] = scale_of_group(record, lane_of() + 32 * i);
#pragma unroll
    for (int i = 0; i < kScanned / 2 && kFp8; ++i) lifts[i] = lift_of_tile(record, lane_of() + 32 * i);
  }
  // Asks for what store() needs.
  __device__ __forceinline__ void foresee_store(const Record& record) {
    if (!kFp8) return;
    v_scale = a.kv.v_scale[record.facts.head + zero_of_lane()];
    if (kMeanAhead) load_mean(record);
  }
  __device__ __forceinline__ void load_mean(const Record& record) {
    v_mean.load(a.kv.v_mean + record.facts.head * p.head_dim, p.head_dim, lane_of());
  }
  // An item begins.
  __device__ __forceinline__ void begin(const Record& record) {
    wild = __shfl_sync(0xffffffffu, wild, 0);  // now it may be a register of the warp's
    float top_scale = scales[0], top_lift = kFp8 ? lifts[0] : 0.0f;
#pragma unroll
    for (int i = 1; i < kScanned; ++i) top_scale = fmaxf(top_scale, scales[i]);
#pragma unroll
    for (int i = 1; i < kScanned / 2 && kFp8; ++i) top_lift = fmaxf(top_lift, lifts[i]);
#pragma unroll 4
    for (int i = lane_of() + 32 * kScanned; seen_from(record) + i * kKeyGroup < record.keys.end; i += 32) {
      top_scale = fmaxf(top_scale, scale_of_group(record, i));
      if (kFp8) top_lift = fmaxf(top_lift, lift_of_tile(record, i - 16 * kScanned));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q_slope[h] *= fabsf(p.scale) * kLog2e;
      rounded_l[h] = saw_lift[h] = 0.0f;
    }
    lifted = __any_sync(0xffffffffu, top_lift > 0.0f);
    exact = kFp8 ? opaque(int(p.lse || lifted)) : 0;
    v_lift = 0.0f, unlift = 1.0f;
    const float top_q = max_of_warp(fmaxf(q_scales[0], q_scales[1])) * (fabsf(p.scale) * kLog2e);
    const float steepest = slope_of(top_q, max_of_warp(top_scale));
    smooth = opaque(int(kPlain && wild == 0 && !lifted && !(steepest > kSteep)));
    clear_outputs();
    rows = Rows();
    calm = promoted = false;
  }
  // What is to be known of the next tile. kWhole: all its keys exist.
  template <bool kWhole>
  __device__ __forceinline__ void fetch() {
    const float* const g_scales = g_k_scale + group;
    k_scale[0] = g_scales[0];
#pragma unroll
    for (int c = 1; c < kParts; ++c) k_scale[c] = kWhole ? g_scales[c] : g_k_scale[min(group + c, last_group)];
    group += kParts;
  }

  // How many of the next tiles are steady: no reference is looked for, nothing is masked, until outputs are promoted.
  // left: tiles, whole: those that every row sees. The last tile was one of these, so every row has a reference; or is
  // NaN, and needs none.
  __device__ __forceinline__ int steady(int left, int whole) const {
    if (!smooth) return 0;
    const int run = min(left, whole);
    return exact ? min(run, 1) : kFp8 ? min(run, left % kTogether + 1) : run;
  }
  // A steady tile, to its P. outputs(): returns once the product of the tile before is done. Returns whether close()
  // has something to do.
  template <class Outputs>
  __device__ __forceinline__ bool weigh_steady(Outputs outputs) {
    const Slopes slopes = slopes_of_tile();
    take_plain_weights<true>(slopes, outputs);
    return __any_sync(0xffffffffu, too_large());
  }
  // After a tile.
  __device__ __forceinline__ void pass() {
    if (!kFp8) rows.add(sums);
    __syncwarp();  // every lane has read K, where it did
  }
  // Any tile: its scores become weights,
  __device__ __forceinline__ void weigh(const Record& record, int key0, bool whole, int k_stage) {
    moved = false;
    const Slopes slopes = slopes_of_tile();
    if (!kRuns && smooth && calm && whole) return take_plain_weights<false>(slopes, [] {});
    if (kFp8 && lifted) v_lift = g_v_lift[uint32_t(key0) / kLiftKeys];
    to_floats<true>(S, dots);
    take_seen_weights(record, key0, whole, k_stage, slopes, !calm);
    calm = calm || rows.settled();
    sums = sum_of(S);
    if (kFp8 && moved) normalise();
  }
  // and, once the product of the tile before is done, P.
  __device__ __forceinline__ void round() {
    if (kFp8) add_rounded();
    P.round(S);
  }
  // An item's first tile: its references have just been found.
  template <class Release, class AwaitV>
  __device__ __forceinline__ void open(const Record& record, int key0, bool whole, int k_stage, Release release,
                                       AwaitV) {
    weigh(record, key0, whole, k_stage);
    // Scores so large that a reference, as rounded, may be far from them. E4M3's references were moved already.
    if (!kFp8 && unlikely(__any_sync(0xffffffffu, too_large()))) {
      moved = false;
      normalise();
    }
    P.round(S);
    if (kFp8 && exact) add_exactly();
    moved = false;
    pass();
    release();
  }
  // What is left to do for a tile, which is seldom anything. left: tiles, this one included. release(): K is no longer
  // read.
  template <class Release, class AwaitV>
  __device__ __forceinline__ void close(const Record& record, int key0, bool whole, int q_stage, int k_stage, int left,
                                        Release release, AwaitV) {
    const bool promotes = kFp8 && left % kTogether == 0;
    const bool large = too_large();
    if (unlikely(__any_sync(0xffffffffu, large || moved || promotes || exact))) {
      if (moved) rescale_all();
      if (__any_sync(0xffffffffu, large)) {
        shrink(record, key0, whole, q_stage, k_stage);
        rescale_all();
      }
      moved = false;
      if (promotes) promote();
      if (kFp8 && exact) add_exactly();
    }
    pass();
    release();
  }
  __device__ __forceinline__ void store(const Record& record, int, bool aligned) {
    if (kFp8) {
      add_rounded();
      // Beside values far beyond the sample other weights may round to 0; they count all the same.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (lifted && max_of_quad(saw_lift[h]) > 0.0f) rounded_l[h] = rows.l[h];
        if (!exact) rows.l[h] = rounded_l[h];
      }
    }
    if (kFp8 && promoted) {
#pragma unroll
      for (int j = 0; j < kOTiles; ++j) {
        const float4 more = s_promoted()[32 * j];
        O[0][j][0] += more.x, O[0][j][1] += more.y, O[0][j][2] += more.z, O[0][j][3] += more.w;
      }
      __syncwarp();  // rows go where these were
    }
    const auto lift = [&](int row) { return kPlain ? p.scale * a.lift[record.facts.row + row] : 0.0f; };
    const auto v = [&](int key, int d) {
      if (kFp8) return transposed_is_nan(a, record.facts.head, transposed_from(p, record) + key, d) ? nan() : 0.0f;
      return to_float(HeadRows<Element>(p.kv.v, record.b, record.seq.k0, record.kv_head, 0, 0, false).row(key)[d]);
    };
    if (kFp8 && !kMeanAhead) load_mean(record);
    constexpr int kPanelBytes = Panels<16, kHeadDim>::kPanelBytes;
    finish<kPanelBytes>(p, record, O, rows, own_aside(), warp_row(), lane_of(), aligned, kFp8 ? v_scale : 1.0f,
                        kFp8 ? rounded_l : rows.l, lift, v, v_mean);
  }

 private:
  // Where the keys that the item sees begin, in whole tiles of V.
  __device__ static __forceinline__ int seen_from(const Record& record) {
    return record.keys.begin / kLiftKeys * kLiftKeys;
  }
  // Of those keys' groups and tiles; 0 where there are no more.
  __device__ __forceinline__ float scale_of_group(const Record& record, int i) const {
    const int key = seen_from(record) + i * kKeyGroup;
    return key < record.keys.end ? g_k_scale[key / kKeyGroup] : 0.0f;
  }
  __device__ __forceinline__ float lift_of_tile(const Record& record, int i) const {
    const int key = seen_from(record) + i * kLiftKeys;
    return key < record.keys.end ? g_v_lift[key / kLiftKeys] : 0.0f;
  }
  // From S to base-2 scores.
  struct Slopes {
    float of[2][kParts];
  };

  __device__ __forceinline__ Slopes slopes_of_tile() const {
    Slopes slopes;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        // Few enough bits for its product with kMagic to be exact, and whole numbers to come off exactly.
        const float slope = slope_of(q_slope[h], k_scale[c]);
        slopes.of[h][c] = bits_to_float(float_to_bits(slope) & ~0xfu);
      }
    return slopes;
  }
  // S: scores as the rows see them. Returns what is left of the slopes.
  __device__ __forceinline__ Slopes prepare(const Record& record, int key0, bool whole, int k_stage, Slopes slopes) {
    if (unlikely(wild)) spoil_wild<KTile::kChunks>(S, s.k + k_stage * KTile::kBytes, lane_of() % 4 * 2);
    if (!kPlain) {
      lift_and_scale(S, slopes.of, 0.0f, a.lift + record.facts.row + warp_row() + lane_of() / 4, p);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < kParts; ++c) slopes.of[h][c] = 1.0f;
    }
    if (unlikely(!whole)) mask_tile(S, tile_mask(record, key0));
    return slopes;
  }
  // S becomes the weights of what rows see. search: for rows' largest scores first, which may move references.
  __device__ __forceinline__ void take_seen_weights(const Record& record, int key0, bool whole, int k_stage,
                                                    const Slopes& of_tile, bool search) {
    const Slopes slopes = prepare(record, key0, whole, k_stage, of_tile);
    if (search) moved = move(slopes) || moved;
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float shift = v_lift - reference_of(rows.m[e / 2]);
        S[0][j][e] = ex2(fmaf(S[0][j][e], slopes.of[e / 2][j * kParts / kNTiles], shift));
      }
  }
  __device__ __forceinline__ bool move(const Slopes& slopes) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -infinity();
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        constexpr int kRun = kNTiles / kParts;
        most = fmaxf(most, fmaf(largest_score(S, h, c * kRun, (c + 1) * kRun), slopes.of[h][c], v_lift));
      }
      largest[h] = ceilf(max_of_quad(most));  // an integer: what moves it are powers of two
    }
    return move_reference(largest, rows, rescale);
  }
  // From dots that are all seen, by rows that have references: they become floats by an addition, kMagic more than they
  // are, which comes off again, exactly, with the reference. To convert takes longer.
  // Sums come with them, for the eight clocks that each exponential takes, and, kRounds, P, from when outputs() has
  // returned, halfway.
  template <bool kRounds, class Outputs>
  __device__ __forceinline__ void take_plain_weights(const Slopes& slopes, Outputs outputs) {
    float shift[2][kParts];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < kParts; ++c) shift[h][c] = fmaf(-kMagic, slopes.of[h][c], -rows.m[h]);
    constexpr int kChunks = 8, kWords = Weights<kFp8>::kWords / kChunks;
    float sum[4] = {};
    const auto each = [&](int chunk, auto f) {
#pragma unroll
      for (int word = chunk * kWords; word < (chunk + 1) * kWords; ++word)
#pragma unroll
        for (int i = 0; i < Weights<kFp8>::kPerWord; ++i) {
          const Lot lot = Weights<kFp8>::lot(word, i);
          f(lot.j, lot.e);
        }
    };
    const auto shift_scores = [&](int chunk) {
      each(chunk, [&](int j, int e) {
        const int c = j * kParts / kNTiles;
        S[0][j][e] = fmaf(bits_to_float(uint32_t(dots[0][j][e] + kMagicBits)), slopes.of[e / 2][c], shift[e / 2][c]);
      });
    };
    const auto round = [&](int chunk) {
#pragma unroll
      for (int word = chunk * kWords; word < (chunk + 1) * kWords; ++word) P.round(S, word);
    };
    shift_scores(0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk + 1 < kChunks) shift_scores(chunk + 1);
      each(chunk, [&](int j, int e) { S[0][j][e] = ex2(S[0][j][e]); });
      if (!kFp8 && chunk > 0) each(chunk - 1, [&](int j, int e) { sum[e] += S[0][j][e]; });
      const int late = chunk - kChunks / 2;
      if (kRounds && late == 0) {
        outputs();
        if (kFp8) add_rounded();
        round(0);
      }
      if (kRounds && late > 0) {
        round(2 * late - 1);
        round(2 * late);
      }
    }
    if (kRounds) round(kChunks - 1);
    if (!kFp8) {
      each(kChunks - 1, [&](int j, int e) { sum[e] += S[0][j][e]; });
      sums = {{sum[0] + sum[1], sum[2] + sum[3]}};
    }
  }
  // Weights of some row are too large for P: from its scores once more, relative to a reference that has moved, and
  // with it all that is relative to it.
  __device__ __forceinline__ void shrink(const Record& record, int key0, bool whole, int q_stage, int k_stage) {
    moved = false;
    start_with(dots, 0);
    scores_again<Tensor8<90>>(dots, s, q_stage, k_stage);
    to_floats<true>(S, dots);
    take_seen_weights(record, key0, whole, k_stage, slopes_of_tile(), true);
    sums = sum_of(S);
    normalise();
    P.round(S);
  }
  // Are weights too large for P? For E4M3 they are there already.
  __device__ __forceinline__ bool too_large() const {
    return kFp8 ? P.too_large() : fmaxf(sums.of[0], sums.of[1]) > Weights<kFp8>::kMost;
  }
  // Moves references that rose just now, or are too small, so that a row's largest sum of weights, among its lanes,
  // lies in 64 .. 128, but never below where they were: weights seldom grow from there to 256 and more, and those far
  // below the sum, to 2^-13 of it, are still normal numbers in E4M3.
  __device__ __forceinline__ void normalise() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = max_of_quad(sums.of[h]);
      const int rise = moved ? 127 - int(float_to_bits(rescale[h]) >> 23) : 0;       // of the reference, just now
      const bool moves = (rise > 0 && most > 0.0f) || most >= Weights<kFp8>::kMost;  // not where all is masked so far
      const int up = moves && most < infinity() ? max(int(float_to_bits(most) >> 23) - 127 - 6, -rise) : 0;
      const float factor = bits_to_float(uint32_t(127 - up) << 23);
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) S[0][j][2 * h] *= factor, S[0][j][2 * h + 1] *= factor;
      sums.of[h] *= factor;
      rows.m[h] += float(up);
      rows.l[h] *= factor;
      rescale[h] = moved ? rescale[h] * factor : factor;
    }
    moved = true;
  }
  // What was relative to references that moved.
  __device__ __forceinline__ void rescale_all() {
    rescale_outputs(O, rescale);
    if (!kFp8) return;
    rounded_l[0] *= rescale[0], rounded_l[1] *= rescale[1];
    if (promoted) rescale_promoted();
  }
  // The weights that were multiplied last.
  __device__ __forceinline__ void add_rounded() {
#pragma unroll
    for (int h = 0; h < 2; ++h) rounded_l[h] = fmaf(added[0][2 * h], unlift, rounded_l[h]);
  }
  // This tile's weights, before rounding, to their sums.
  __device__ __forceinline__ void add_exactly() {
    sums = sum_of(S);
    unlift = ex2(-v_lift);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.l[h] = fmaf(sums.of[h], unlift, rows.l[h]);
      if (v_lift > 0.0f && sums.of[h] > 0.0f) saw_lift[h] = 1.0f;
    }
  }

  // What is loaded from an address that ptxas knows to be the same for all lanes it moves to a register of the warp's,
  // and waits for it there and then. So addresses get this added, of which it does not know that it is 0.
  __device__ static __forceinline__ int zero_of_lane() { return fresh_tid() / 1024; }
  __device__ __forceinline__ void clear_outputs() {
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) O[0][j][e] = 0.0f;
  }
  static __device__ __forceinline__ char* s_ones(const Shared& s) { return s.aside + kAsideBytes; }
  // This warp's part of the space aside.
  __device__ __forceinline__ char* own_aside() const { return s.aside + warp_row() * (kAsideBytes / kBlockM); }
  __device__ __forceinline__ float4* s_promoted() const { return reinterpret_cast<float4*>(own_aside()) + lane_of(); }
  // Sums of products of 8-bit floats keep about 12 bits, and lose the others towards zero: where V keeps a mean, as it
  // does when that changes along the sequence, nearly 2 % of it for every 1000 keys. So now and then they are added up
  // elsewhere, in float32.
  __device__ __forceinline__ void promote() {
    float4* const s_sums = s_promoted();
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      float4 sum = make_float4(O[0][j][0], O[0][j][1], O[0][j][2], O[0][j][3]);
      if (promoted) {
        const float4 before = s_sums[32 * j];
        sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
      }
      s_sums[32 * j] = sum;
    }
    promoted = true;
    clear_outputs();
  }
  __device__ __forceinline__ void rescale_promoted() {
    float4* const s_sums = s_promoted();
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      float4& sum = s_sums[32 * j];
      sum.x *= rescale[0], sum.y *= rescale[0], sum.z *= rescale[1], sum.w *= rescale[1];
    }
  }
};

}  // namespace sm90
}  // namespace qf
