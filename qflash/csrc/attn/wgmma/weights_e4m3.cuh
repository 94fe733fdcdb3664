// Weights policy: P rounded to E4M3, V in E4M3 and transposed, with one scale per head, a mean per channel subtracted,
// and, for the few tiles with values far beyond the sample that gave the scale, one exponent per kExponentKeys keys:
// V = v_scale 2^exponent V8 + v_mean. With P' = P 2^exponent, rounded, as the MMA operand:
//   out = v_scale (sum of P' V8) / (sum of 2^-exponent P') + v_mean
#pragma once

#include "attn/wgmma/producer.cuh"
#include "attn/wgmma/scores_int8.cuh"
#include "ptx/cvt.cuh"

namespace qf {
namespace wgmma {

template <class Config_>
struct E4m3Weights {
  using Config = Config_;
  using Work = WorkTile<Config>;
  using Values = AlongRows<typename Config::VTile>;
  using OnesTile = typename Config::OnesTile;
  static constexpr int kNTiles = Config::kNTiles, kOTiles = Config::kOTiles;
  static constexpr int kKeySteps = Config::kBlockN / 32;  // wgmma steps
  static constexpr bool kRemainders = false;
  // Rows are divided by the sums of weights as they were rounded, which an MMA with ones computes: rows then remain
  // averages of V however coarse the rounding is.
  static constexpr bool kSumsAsMultiplied = true;
  static constexpr bool kNormalises = true;
  static constexpr float kMostSum = 256.0f;                    // E4M3 ends at 448: below this no weight was cut off
  static constexpr int kScanned = 2;                           // exponents that a lane prefetches
  static constexpr bool kMeanAhead = Config::kHeadDim <= 128;  // V's mean is loaded ahead of time; takes registers

  const QuantizedProblem& a;
  AlongRows<OnesTile> ones;
  uint32_t P[kKeySteps][4];
  float product_sums[1][4];       // row sums of P, of 32 keys per lane, with each MMA
  float rounded_l[2];             // of all tiles
  const float* g_exponent;        // of the head's tiles of V
  float exponents[kScanned];      // this lane's share of the work tile's exponents
  bool some_exponent;             // in the work tile
  float tile_exponent, unscaled;  // of the tile being weighed; 2^-exponent of the one being multiplied
  float saw_exponent[2];          // 1 if the row has weights in a tile with an exponent
  int exact;                      // sums before rounding are needed, too
  float v_scale;                  // of the work tile
  float2 v_mean[kOTiles];         // of the lane's channels in each 8

  __device__ __forceinline__ E4m3Weights(const QuantizedProblem& params, const SharedMemory<Config>& s)
      : a(params), ones(s_ones(s)) {
    ones.low = warp_uniform(ones.low);
  }
  // Called by all threads of the block: ones in E4M3, two columns for every 32 keys, zeros elsewhere.
  __device__ static __forceinline__ void set_up(const SharedMemory<Config>& s) {
    for (int i = threadIdx.x; i < OnesTile::kBytes / 4; i += Config::kThreads) {
      const int row = i / 32, chunk = i % 32 / 4 ^ row;  // of the tile, which is swizzled like all others
      reinterpret_cast<uint32_t*>(s_ones(s))[i] = chunk / 2 == row / 2 ? 0x38383838u : 0u;
    }
    fence_proxy_async();  // them, to wgmma
  }
  __device__ __forceinline__ void prefetch(const Work& work) {
    g_exponent = a.kv.v_exponents + work.facts.v_exponent_at;
#pragma unroll
    for (int i = 0; i < kScanned; ++i) exponents[i] = exponent_of_tile(work, lane_index() + 32 * i);
  }
  __device__ __forceinline__ void prefetch_output(const Work& work) {
    v_scale = a.kv.v_scale[work.facts.head + zero_of_lane()];
    if (kMeanAhead) load_mean(work);
  }
  __device__ __forceinline__ void begin(const Work& work) {
    float top = exponents[0];
#pragma unroll
    for (int i = 1; i < kScanned; ++i) top = fmaxf(top, exponents[i]);
#pragma unroll 4
    for (int i = lane_index() + 32 * kScanned;
         Config::exponents_from(work.keys.begin) + i * Config::kExponentKeys < work.keys.end; i += 32)
      top = fmaxf(top, exponent_of_tile(work, i));
    some_exponent = __any_sync(0xffffffffu, top > 0.0f);
    exact = opaque(int(a.attn.lse || some_exponent));
    tile_exponent = 0.0f, unscaled = 1.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) rounded_l[h] = saw_exponent[h] = 0.0f;
  }
  __device__ __forceinline__ void begin_tile(int key0) {
    if (some_exponent) tile_exponent = g_exponent[uint32_t(key0) / Config::kExponentKeys];
  }
  __device__ __forceinline__ bool has_exponents() const { return some_exponent; }
  __device__ __forceinline__ float exponent() const { return tile_exponent; }
  // The number of `run` steady tiles before sums are added exactly or outputs promoted (rare_int8.cuh).
  __device__ __forceinline__ int steady_tiles(int left, int run) const {
    return exact ? min(run, 1) : min(run, left % Config::kPromotedTiles + 1);
  }

  // Words of four keys each: two of one block of 8 and two of the next, in the key order of V.
  static constexpr int kWords = Config::kBlockN / 8, kPerWord = 4;
  __device__ static __forceinline__ constexpr WeightIndex index(int word, int i) {
    return {word / 4 * 4 + word % 4 / 2 * 2 + i / 2, word % 2 * 2 + i % 2};
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4], int word) {
    const auto weight = [&](int i) { return S[0][index(word, i).j][index(word, i).e]; };
    P[word / 4][word % 4] = cvt_rn_e4m3x4_f32(weight(0), weight(1), weight(2), weight(3));
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) round(S, word);
  }
  // Is a weight kMostSum or more, or NaN? 256 = 2^8 has the code 0x78, so adding 8 to a code from there on sets the
  // sign bit.
  __device__ __forceinline__ bool too_large(const RowState&) const {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) signs |= P[i][r] + 0x08080808u;
    return (signs & 0x80808080u) != 0;
  }
  __device__ __forceinline__ void add_sums(RowState&) const {}  // rare_int8.cuh does that, if they are needed
  __device__ __forceinline__ void add_first_sums(RowState& rows, const float (&S)[1][kNTiles][4]) {
    if (exact) add_exactly(rows, S);
  }

  // O += P V, and product_sums = row sums of P. The tensor cores lose what is small next to the accumulator, so every
  // 32 keys have an accumulator, i.e. columns, of their own.
  __device__ __forceinline__ void start_product(float (&O)[1][kOTiles][4], const Values& v) {
    hold(O[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      WgmmaE4m3<Config::kHeadDim>::multiply(O[0], P[i], v.step(i));
      WgmmaE4m3<8>::multiply(product_sums, P[i], ones.step(i), i > 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void hold_sums() { hold(product_sums); }
  __device__ __forceinline__ void finish_product() {
#pragma unroll
    for (int h = 0; h < 2; ++h) rounded_l[h] = fmaf(product_sums[0][2 * h], unscaled, rounded_l[h]);
  }
  // Adds this tile's weights, before rounding, to their sums.
  __device__ __forceinline__ void add_exactly(RowState& rows, const float (&S)[1][kNTiles][4]) {
    sum_weights(rows, S);
    unscaled = ex2(-tile_exponent);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.l[h] = fmaf(rows.sums[h], unscaled, rows.l[h]);
      if (tile_exponent > 0.0f && rows.sums[h] > 0.0f) saw_exponent[h] = 1.0f;
    }
  }
  __device__ __forceinline__ void rescale(const float (&by)[2]) { rounded_l[0] *= by[0], rounded_l[1] *= by[1]; }

  // All tiles are done. Next to values far beyond the sample other weights may round to 0; they still count.
  __device__ __forceinline__ void finish_sums(RowState& rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (some_exponent && max_of_quad(saw_exponent[h]) > 0.0f) rounded_l[h] = rows.l[h];
      if (!exact) rows.l[h] = rounded_l[h];
    }
  }
  __device__ __forceinline__ void load_mean(const Work& work) {
    const float* const g_mean = a.kv.v_mean + work.facts.head * a.attn.head_dim;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j) {
      const int d = 8 * j + lane_index() % 4 * 2;
      v_mean[j] = d < a.attn.head_dim ? *reinterpret_cast<const float2*>(g_mean + d) : make_float2(0.0f, 0.0f);
    }
  }

 private:
  // The exponent of a tile among those that the work tile sees; 0 past the last.
  __device__ __forceinline__ float exponent_of_tile(const Work& work, int i) const {
    const int key = Config::exponents_from(work.keys.begin) + i * Config::kExponentKeys;
    return key < work.keys.end ? g_exponent[key / Config::kExponentKeys] : 0.0f;
  }
  __device__ static __forceinline__ char* s_ones(const SharedMemory<Config>& s) {
    return s.scratch + Config::kOutputBytes;
  }
};

// Clears NaN in tiles of V in E4M3, which has no infinity.
template <class Config>
struct E4m3Inspector {
  const QuantizedProblem& a;

  __device__ __forceinline__ explicit E4m3Inspector(const QuantizedProblem& params) : a(params) {}
  __device__ __forceinline__ bool wanted(const WorkTile<Config>& work) const {
    return a.kv.v_nonfinite[work.facts.head] != 0;
  }
  __device__ __forceinline__ bool clear(char* s_tile, int thread) const {
    bool found = false;
    for (int i = thread; i < Config::VTile::kBytes / 4; i += Config::kInspectorThreads) {
      uint32_t& word = reinterpret_cast<uint32_t*>(s_tile)[i];
      const uint32_t nan = (word & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u;  // 0x80 for every byte that is NaN
      if (nan == 0) continue;
      word &= ~((nan >> 7) * 0xffu);
      found = true;
    }
    if (found) fence_proxy_async();  // makes the zeros visible to wgmma
    return found;
  }
};

// Is V of channel d NaN at the position of `column`, which counts keys in sequence order?
__device__ inline bool transposed_is_nan(const QuantizedProblem& a, int64_t head, int64_t column, int d) {
  const int64_t in_block = column % 16;  // see quant/sm90/values.cuh: pairs from two blocks of 8 keys alternate
  const int64_t position = column - in_block + in_block % 8 / 2 * 4 + in_block / 8 * 2 + in_block % 2;
  return (a.kv.v[(head * a.attn.head_dim + d) * a.v_columns + position] & 0x7f) == 0x7f;
}

}  // namespace wgmma
}  // namespace qf
