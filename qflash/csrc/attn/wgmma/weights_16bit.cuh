// Weights policy: P rounded to 16 bits, V as it is. O += P V with P from registers.
#pragma once

#include "attn/mma/state.cuh"
#include "attn/pages.cuh"
#include "attn/tile_load.cuh"
#include "attn/wgmma/output.cuh"
#include "attn/wgmma/shared_memory.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace wgmma {

// Index of one of a lane's weights in S: S[0][j][e].
struct WeightIndex {
  int j, e;
};

// kRemainders: in rows that see few keys, what rounding took off their weights is added by an MMA of its own, because
// no average over many keys hides it there.
template <class Config_, bool kRemainders_>
struct SixteenBitWeights {
  using Config = Config_;
  using Work = WorkTile<Config>;
  using Values = AlongColumns<typename Config::VTile>;
  static constexpr int kNTiles = Config::kNTiles, kOTiles = Config::kOTiles;
  static constexpr int kKeySteps = Config::kBlockN / 16;  // wgmma steps
  static constexpr bool kRemainders = kRemainders_;
  static constexpr bool kSumsAsMultiplied = false;  // rows are divided by sums of weights before rounding
  static constexpr bool kNormalises = false;
  // Limit on a lane's sum of weights of a row and tile before the row's reference must move: float16 can hold it.
  static constexpr float kMostSum = 16384.0f;

  uint32_t P[kKeySteps][4];
  bool sees_few;  // some row of this consumer sees few keys

  template <class Params>
  __device__ __forceinline__ SixteenBitWeights(const Params&, const SharedMemory<Config>&) {}
  __device__ static __forceinline__ void set_up(const SharedMemory<Config>&) {}
  __device__ __forceinline__ void prefetch(const Work&) {}
  __device__ __forceinline__ void prefetch_output(const Work&) {}
  __device__ __forceinline__ void begin(const Work& work) {
    // The number of keys that every row of the block sees decides this in all but a few work tiles.
    sees_few = kRemainders && work.full.end - work.full.begin < kFewKeys && some_row_sees_few(work);
  }
  __device__ __forceinline__ void begin_tile(int) {}
  __device__ __forceinline__ bool has_exponents() const { return false; }
  __device__ __forceinline__ float exponent() const { return 0.0f; }
  __device__ __forceinline__ int steady_tiles(int, int run) const { return run; }

  // Two weights per word.
  static constexpr int kWords = Config::kBlockN / 4, kPerWord = 2;
  __device__ static __forceinline__ constexpr WeightIndex index(int word, int i) {
    return {word / 4 * 2 + word % 4 / 2, word % 2 * 2 + i};
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4], int word) {
    P[word / 4][word % 4] = pair<Rounded>(S, word);
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) round(S, word);
  }
  __device__ __forceinline__ bool too_large(const RowState& rows) const {
    return fmaxf(rows.sums[0], rows.sums[1]) > kMostSum;
  }
  __device__ __forceinline__ void add_sums(RowState& rows) const { rows.add_sums(); }
  __device__ __forceinline__ void add_first_sums(RowState& rows, const float (&)[1][kNTiles][4]) { rows.add_sums(); }

  __device__ __forceinline__ void start_product(float (&O)[1][kOTiles][4], const Values& v) {
    hold(O[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) Multiply::template multiply<true>(O[0], P[i], v.step(i));
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_sums() {}
  __device__ __forceinline__ void finish_product() {}
  // O += what rounding took off the weights of 16 keys, times V. `R` belongs to the caller, because the MMA reads it
  // until the caller has waited.
  __device__ __forceinline__ void start_remainder(float (&O)[1][kOTiles][4], const float (&S)[1][kNTiles][4],
                                                  const Values& v, int step, uint32_t (&R)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) R[i] = pair<Remainder>(S, 4 * step + i);
    hold(O[0]);
    wgmma_fence();
    Multiply::template multiply<true>(O[0], R, v.step(step));
    wgmma_commit();
  }

 private:
  using Multiply = Wgmma<typename Config::Element, Config::kHeadDim>;

  template <template <class> class Part>
  __device__ static __forceinline__ uint32_t pair(const float (&S)[1][kNTiles][4], int word) {
    const WeightIndex first = index(word, 0);
    return Part<typename Config::Tensor>::pair(S[0][first.j][first.e], S[0][first.j][first.e + 1]);
  }
  // The number of keys that a row sees is concave in the row: lowest in the first or the last.
  __device__ __forceinline__ bool some_row_sees_few(const Work& work) {
    const int first = work.row0 + consumer_index() * kWarpgroupRows;
    const int last = min(first + kWarpgroupRows, work.seq.len_q) - 1;
    const auto count = [&](int i) { return work.mask.visible(i).end - work.mask.visible(i).begin; };
    return first <= last && min(count(first), count(last)) < kFewKeys;
  }
};

// What output.cuh requires of a kernel that has V in 16 bits.
template <class Config>
struct SixteenBitOutput {
  static constexpr bool kRoundedSums = false, kMean = false;
  static constexpr float gain = 1.0f;
  static constexpr float divisor[2] = {};
  const QfAttnParams& p;
  const WorkTile<Config>& work;

  __device__ __forceinline__ float2 mean(int) const { return make_float2(0.0f, 0.0f); }
  __device__ __forceinline__ float lse_offset(int) const { return 0.0f; }
  __device__ __forceinline__ float value(int key, int d) const {
    using Element = typename Config::Element;
    if constexpr (Config::kPaged)
      return to_float(PagedRows<Element>(p.kv.v, p.kv, work.b, work.kv_head, 0, 0, false).row(key)[d]);
    else
      return to_float(HeadRows<Element>(p.kv.v, work.b, work.seq.k0, work.kv_head, 0, 0, false).row(key)[d]);
  }
};

}  // namespace wgmma
}  // namespace qf
