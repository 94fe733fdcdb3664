// What a consumer of `sm90_int8` computes, for its 64 rows: S = Q Kt of integers, weights, O += P V in 16 bits or in
// E4M3. attn/sm90/consumer.cuh says when.
#pragma once

#include "attn/mma/int8.cuh"
#include "attn/sm90/output.cuh"
#include "attn/sm90/producer.cuh"
#include "attn/sm90/scores.cuh"
#include "attn/sm90/shared.cuh"
#include "attn/tile_load.cuh"
#include "kernels/sm90_int8/params.h"
#include "kernels/sm90_int8/weights.cuh"

namespace qf {
namespace sm90 {

// kPlain: scales_plainly().
template <bool kPlain>
struct Math {
  using Params = Quantized;
  using Keys = AlongRows<KTile>;
  using Values = Weights<kFp8>::Values;
  static constexpr bool kReadsKeys = true;

  const Quantized& a;
  const QfAttnParams& p;
  const Shared& s;
  float O[1][kOTiles][4], S[1][kNTiles][4];
  int32_t dots[1][kNTiles][4];  // S, as integers
  Weights<kFp8> P;
  Rows rows;
  TileSums sums[kParts];                  // of this tile's weights
  float rounded_l[2];                     // sums of all weights as they were multiplied, where that makes a difference
  float saw_lift[2];                      // 1 where the row has weights in a tile that is lifted
  float unlift[kParts];                   // of the tile that is multiplied: weights are as many times too large
  float q_slope[2];                       // of the lane's rows: from dots to base-2 scores, K's scale apart
  const float *g_k_scale, *g_v_lift;      // of the sequence's keys in their head
  float k_scale[kParts], v_lift[kParts];  // of this tile
  float v_scale;                          // of the item
  float rescale[2];                       // of outputs,
  bool moved;                             // where references moved
  bool promoted;                          // some outputs are aside
  int wild;                               // not 0: some keys are not finite
  bool steep;                             // references would not come off the next tile's scores exactly
  bool calm;                              // every row has a reference: maxima need not be looked for

  __device__ __forceinline__ Math(const Params& params, const Shared& shared) : a(params), p(params.attn), s(shared) {}

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
    P.multiply(O[0], v);
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_outputs() { hold(O[0]); }
  // While scores are on their way.
  __device__ __forceinline__ void get_ready() {
    bool found = false;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < kParts; ++c) found |= slope_of(q_slope[h], k_scale[c]) > kSteep;
    steep = __any_sync(0xffffffffu, found);
  }
  // Under the product just started.
  __device__ __forceinline__ void sum_rounded() { P.add_to(rounded_l, unlift); }

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
    if (kFp8) g_v_lift = a.kv.v_lift + facts.v_lift_at;
    wild = a.kv.k_wild[facts.head + zero_of_lane()];
    const float* const g_q_scale = a.q_scale + facts.row;
    const int row = warp_row() + lane_of() / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) q_slope[h] = row + 8 * h < record.rows ? g_q_scale[row + 8 * h] : 0.0f;
    fetch(record, record.keys.begin);
  }
  // Asks for what store() needs.
  __device__ __forceinline__ void foresee_store(const Record& record) {
    if (kFp8) v_scale = a.kv.v_scale[record.facts.head + zero_of_lane()];
  }
  // An item begins.
  __device__ __forceinline__ void begin(const Record&) {
    wild = __shfl_sync(0xffffffffu, wild, 0);  // now it may be a register of the warp's
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      q_slope[h] *= fabsf(p.scale) * kLog2e;
      rounded_l[h] = saw_lift[h] = 0.0f;
    }
    clear_outputs();
    rows = Rows();
    calm = promoted = false;
  }
  // What is to be known of the tile that begins at key0.
  __device__ __forceinline__ void fetch(const Record&, int key0) {
    const int first = key0 / kKeyGroup, last = (p.k_len - 1) / kKeyGroup, zero = zero_of_lane();
#pragma unroll
    for (int c = 0; c < kParts; ++c) k_scale[c] = g_k_scale[min(first + c, last) + zero];
#pragma unroll
    for (int c = 0; c < kParts; ++c)
      v_lift[c] = kFp8 ? g_v_lift[min(key0 + c * kKeyGroup, p.k_len - 1) / kLiftKeys + zero] : 0.0f;
  }

  __device__ __forceinline__ void weigh_first(const Record& record, int key0, bool whole, int q_stage, int k_stage) {
    weigh(record, key0, whole, q_stage, k_stage);
    account();
  }
  // Scores become weights. Returns false: nothing has to be computed again once the outputs are there.
  __device__ __forceinline__ bool weigh(const Record& record, int key0, bool whole, int q_stage, int k_stage) {
    moved = false;
    Slopes slopes = slopes_of_tile();
    if (kPlain && calm && whole && !wild && !steep) {
      take_plain_weights(slopes);
    } else {
      to_floats<true>(S, dots);
      slopes = prepare(record, key0, whole, k_stage, slopes);
      if (!calm) {
        moved = move(slopes);
        calm = rows.settled();
      }
      take_weights(slopes);
    }
    sum_weights(sums, S);
    if (kFp8 && unlikely(moved)) normalise();
    if (unlikely(__any_sync(0xffffffffu, fmaxf(of_row(0), of_row(1)) > Weights<kFp8>::kMost))) {
      if (__any_sync(0xffffffffu, largest_weight() == infinity())) {
        start_with(dots, 0);
        scores_again<Tensor8<90>>(dots, s, q_stage, k_stage);
        to_floats<true>(S, dots);
        slopes = prepare(record, key0, whole, k_stage, slopes_of_tile());
        moved = move(slopes) || moved;
        take_weights(slopes);
        sum_weights(sums, S);
      }
      normalise();
    }
    return false;
  }
  __device__ __forceinline__ void recover(const Record&, int, bool, int, int) {}
  __device__ __forceinline__ void account() {
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      unlift[c] = kFp8 ? ex2(-v_lift[c]) : 1.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) rows.l[h] = fmaf(sums[c].of[h], unlift[c], rows.l[h]);
    }
    if (kFp8 && moved) rounded_l[0] *= rescale[0], rounded_l[1] *= rescale[1];
    if (kFp8 && unlikely(lifts())) note_lifts();
  }
  // What the outputs so far are owed, once their product is done. left: tiles, this one included.
  __device__ __forceinline__ void settle_outputs(int left) {
    constexpr int kTogether = 2048 / kBlockN;  // tiles whose products 8-bit floats' sums hold well enough
    if (unlikely(moved)) {
      rescale_outputs(O, rescale);
      if (kFp8 && promoted) rescale_promoted();
    }
    if (kFp8 && left % kTogether == 0) promote();
  }
  template <class AwaitV>
  __device__ __forceinline__ void round_weights(const Record&, AwaitV) {
    P.round(S);
  }
  __device__ __forceinline__ void store(const Record& record, int, bool aligned) {
    // Beside values far beyond the sample other weights may round to 0; they count all the same.
    if (kFp8 && max_of_quad(saw_lift[0]) > 0.0f) rounded_l[0] = rows.l[0];
    if (kFp8 && max_of_quad(saw_lift[1]) > 0.0f) rounded_l[1] = rows.l[1];
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
      return to_float(HeadRows<Element>(p.v, record.b, record.seq.k0, record.kv_head, 0, 0, false).row(key)[d]);
    };
    constexpr int kPanelBytes = Panels<16, kHeadDim>::kPanelBytes;
    finish<kPanelBytes>(p, record, O, rows, own_aside(), warp_row(), lane_of(), aligned, kFp8 ? v_scale : 1.0f,
                        kFp8 ? rounded_l : rows.l, lift, v,
                        ChannelMean<kFp8>{a.kv.v_mean + record.facts.head * p.head_dim, p.head_dim});
  }

 private:
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
  __device__ __forceinline__ bool move(const Slopes& slopes) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -infinity();
#pragma unroll
      for (int c = 0; c < kParts; ++c) {
        constexpr int kRun = kNTiles / kParts;
        most = fmaxf(most, fmaf(largest_score(S, h, c * kRun, (c + 1) * kRun), slopes.of[h][c], v_lift[c]));
      }
      largest[h] = ceilf(max_of_quad(most));  // an integer: what moves it are powers of two
    }
    return move_reference(largest, rows, rescale);
  }
  __device__ __forceinline__ float shift_of(int h, int c) const { return v_lift[c] - reference_of(rows.m[h]); }
  __device__ __forceinline__ void take_weights(const Slopes& slopes) {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int c = j * kParts / kNTiles;
        S[0][j][e] = ex2(fmaf(S[0][j][e], slopes.of[e / 2][c], shift_of(e / 2, c)));
      }
  }
  // From dots that are all seen: they become floats by an addition, kMagic more than they are, which comes off again,
  // exactly, with the reference. An instruction that converts takes twice as long.
  __device__ __forceinline__ void take_plain_weights(const Slopes& slopes) {
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      constexpr int kRun = kNTiles / kParts;
      float shift[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) shift[h] = fmaf(-kMagic, slopes.of[h][c], shift_of(h, c));
#pragma unroll
      for (int j = c * kRun; j < (c + 1) * kRun; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float dot = bits_to_float(uint32_t(dots[0][j][e] + kMagicBits));
          S[0][j][e] = ex2(fmaf(dot, slopes.of[e / 2][c], shift[e / 2]));
        }
    }
  }
  // Is there a value in this tile that is far beyond the sample?
  __device__ __forceinline__ bool lifts() const {
    bool found = false;
#pragma unroll
    for (int c = 0; c < kParts; ++c) found |= v_lift[c] > 0.0f;
    return found;
  }
  __device__ __forceinline__ void note_lifts() {
#pragma unroll
    for (int c = 0; c < kParts; ++c)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (v_lift[c] > 0.0f && sums[c].of[h] > 0.0f) saw_lift[h] = 1.0f;
  }
  // Of the lane's weights of row h in this tile.
  __device__ __forceinline__ float of_row(int h) const {
    float sum = sums[0].of[h];
#pragma unroll
    for (int c = 1; c < kParts; ++c) sum += sums[c].of[h];
    return sum;
  }
  __device__ __forceinline__ float largest_weight() const {
    return fmaxf(largest_score(S, 0, 0, kNTiles), largest_score(S, 1, 0, kNTiles));
  }
  // Moves the references of rows whose first weights these are, or whose weights are too large, so that a row's largest
  // sum, among its lanes, lies in 64 .. 128: sums seldom grow from there to 448 and more, and weights far below them,
  // to 2^-13 of the sum, are still normal numbers in E4M3.
  __device__ __forceinline__ void normalise() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = max_of_quad(of_row(h));
      const bool first = max_of_quad(rows.l[h]) == 0.0f && most > 0.0f;  // not where all is masked so far
      const bool moves = first || most > Weights<kFp8>::kMost;
      const int up = moves && most < infinity() ? int(float_to_bits(most) >> 23) - 127 - 6 : 0;
      const float factor = bits_to_float(uint32_t(127 - up) << 23);
#pragma unroll
      for (int j = 0; j < kNTiles; ++j) S[0][j][2 * h] *= factor, S[0][j][2 * h + 1] *= factor;
#pragma unroll
      for (int c = 0; c < kParts; ++c) sums[c].of[h] *= factor;
      rows.m[h] += float(up);
      rows.l[h] *= factor;
      rescale[h] = moved ? rescale[h] * factor : factor;
    }
    moved = true;
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
