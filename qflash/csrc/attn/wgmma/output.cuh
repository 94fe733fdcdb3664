// Stores rows from accumulators to global memory, 16 bytes at a time: through the tile of q that is no longer needed,
// if q has a second stage for the next work tile; otherwise without shared memory: the four lanes of a quad, which hold
// one word of each of four neighbouring chunks, exchange words so that each lane has one chunk.
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/sinks.cuh"
#include "attn/wgmma/softmax.cuh"
#include "attn/wgmma/work_tile.cuh"
#include "ptx/ldst.cuh"
#include "ptx/rcp.cuh"
#include "ptx/stmatrix.cuh"

namespace qf {
namespace wgmma {

// words[i]: before, this lane's word of chunk i; after, word i of this lane's chunk. lane % 4: which word, which chunk.
__device__ __forceinline__ Word4 swap_in_quad(const uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
  // Chunks odd and odd + 2, words of this lane and its neighbour.
  const uint32_t a0 = odd ? x : words[0], a1 = odd ? words[1] : x, b0 = odd ? y : words[2], b1 = odd ? words[3] : y;
  const uint32_t z0 = __shfl_xor_sync(0xffffffffu, high ? a0 : b0, 2);
  const uint32_t z1 = __shfl_xor_sync(0xffffffffu, high ? a1 : b1, 2);
  return high ? Word4{{z0, z1, b0, b1}} : Word4{{a0, a1, z0, z1}};
}

// aligned: in one store.
template <class Element>
__device__ __forceinline__ void store_chunk(Element* g_to, const Word4& words, bool aligned) {
  if (aligned) {
    st_global(g_to, words);
  } else {
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) g_to[e].bits = uint16_t(words.word[e / 2] >> 16 * (e % 2));
  }
}

// Stores a warp's rows. row_at(i): the address of row i, nullptr if it does not exist.
template <class Config, class RowAt>
__device__ __forceinline__ void store_rows(const float (&O)[1][Config::kOTiles][4], RowAt row_at, int head_dim,
                                           bool aligned, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    auto* const g_row = row_at(lane / 4 + 8 * h);
#pragma unroll
    for (int j = 0; j < Config::kOTiles; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = Config::Tensor::pair(O[0][j + i][2 * h], O[0][j + i][2 * h + 1]);
      const Word4 chunk = swap_in_quad(words, lane);
      const int d = (j + lane % 4) * kPerChunk;
      if (g_row && d < head_dim) store_chunk(g_row + d, chunk, aligned);
    }
  }
}

// The same through shared memory, which takes half the instructions and writes full rows at once: a warp's rows, with
// panels kPanelBytes apart.
template <class Config, int kPanelBytes>
struct WarpRows {
  using Element = typename Config::Element;
  using Tile = Panels<16, Config::kHeadDim>;
  static constexpr int kChunks = Tile::kChunks;
  static constexpr uint32_t kAcross = Tile::kCount * kChunks, kDown = 32 / kAcross;  // lanes
  static_assert(kChunks == 8 && kDown <= 8, "chunks are permuted by rows % 8");
  static_assert(kPanelBytes > 0 && 32 % kAcross == 0, "every lane has a chunk");

  char* s_rows;
  uint32_t lane;

  __device__ __forceinline__ void put(const float (&O)[1][Config::kOTiles][4]) const {
    const auto to = rows_then_chunks<kChunks>(lane);
#pragma unroll
    for (int j = 0; j < Config::kOTiles; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = Config::Tensor::pair(O[0][j + i / 2][i % 2 * 2], O[0][j + i / 2][i % 2 * 2 + 1]);
      stmatrix_x4(s_rows + j / kChunks * kPanelBytes + to.at(0, j % kChunks / 2), words);
    }
    __syncwarp();
  }
  // The lane's chunk of row `first` + down(), where first is a multiple of kDown.
  __device__ __forceinline__ uint32_t down() const { return lane / kAcross; }
  __device__ __forceinline__ uint32_t channel() const { return lane % kAcross * kPerChunk; }
  __device__ __forceinline__ Word4 chunk(uint32_t first) const {
    const uint32_t chunk = lane % kAcross, in_row = 16 * (chunk % kChunks ^ down());
    const char* const s_from = s_rows + chunk / kChunks * kPanelBytes + (down() + first) * Tile::kRowBytes;
    return *reinterpret_cast<const Word4*>(s_from + (in_row ^ 16 * (first % 8)));
  }
  // Stores those of `rows` that exist. The code is kept small, because it lies between more frequent paths.
  __device__ __forceinline__ void store(Element* g_first, int64_t stride, int rows, int head_dim, bool aligned) const {
#pragma unroll 1
    for (int first = 0; first < 16; first += kDown) {
      const int row = first + int(down());
      const Word4 words = chunk(first);
      if (row < rows && int(channel()) < head_dim) store_chunk(g_first + row * stride + channel(), words, aligned);
    }
  }
  // Stores all sixteen, if chunks are aligned.
  __device__ __forceinline__ void store_all(Element* g_first, int64_t stride, int head_dim) const {
    constexpr int kRun = kDown > 1 ? 16 : 8;  // rows whose chunks fit registers
    Element* const g_own = g_first + down() * stride + channel();
    if (int(channel()) >= head_dim) return;
#pragma unroll
    for (int run = 0; run < 16; run += kRun) {
      Word4 words[kRun / kDown];
#pragma unroll
      for (int i = 0; i < kRun / kDown; ++i) words[i] = chunk(run + i * kDown);
#pragma unroll
      for (int i = 0; i < kRun / kDown; ++i) st_global(g_own + (run + i * kDown) * stride, words[i]);
    }
  }
};

// An average of numbers that float16 can represent may exceed the largest of them by rounding. All outputs are clamped
// if one exceeds it; if there are enough registers, they are checked for that first.
template <class Element, int kOTiles>
__device__ __forceinline__ void hold_within(float (&O)[1][kOTiles][4]) {
  if (!kIsF16<Element>) return;
  constexpr float kMostHeld = 65504.0f;
  constexpr bool kLooksFirst = kOTiles <= 16;
  const auto within = [](float x) {
    return fabsf(x) > kMostHeld && fabsf(x) < infinity() ? copysignf(kMostHeld, x) : x;
  };
  float most[4] = {};
#pragma unroll
  for (int j = 0; j < kOTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(O[0][j][e]));
  const float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
  if (kLooksFirst && !__any_sync(0xffffffffu, largest > kMostHeld)) return;
#pragma unroll
  for (int j = 0; j < kOTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) O[0][j][e] = within(O[0][j][e]);
}

__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Epilogue: divides a warp's rows by their sums of weights and stores them, and lse. `last` specifies for the kernel:
//   kRoundedSums, divisor[2]   rows are divided by these sums of this lane's weights, not by rows.l
//   gain, kMean, mean(j)       out = gain O / sum + mean, of the lane's pair of channels in each 8
//   lse_offset(row)            what must be added to lse, of a row of the block
//   value(key, d)              V, if some of it is nonfinite
// kPanelBytes > 0: through shared memory at s_rows, with panels that far apart.
template <int kPanelBytes, class Config, class Last>
__device__ __forceinline__ void finish(const QfAttnParams& p, const WorkTile<Config>& work,
                                       float (&O)[1][Config::kOTiles][4], const RowState& rows, char* s_rows,
                                       bool aligned, const Last& last) {
  constexpr int kOTiles = Config::kOTiles;
  const int warp_first = warp_row(), lane = lane_index();
  float sum[2], divisor[2], inverse[2];
  float share[2] = {1.0f, 1.0f};  // of the result without a sink, and so of the mean
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = sum_of_quad(rows.l[r]);
    divisor[r] = Last::kRoundedSums ? sum_of_quad(last.divisor[r]) : sum[r];
    inverse[r] = rcp(divisor[r]) * last.gain;
  }
  const int own_rows = min(16, work.rows - warp_first);
  if (unlikely(p.lse || p.sinks || __any_sync(0xffffffffu, !(sum[0] > 0.0f && sum[1] > 0.0f)))) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = lane / 4 + 8 * r;
      const bool has_offset = (p.lse || p.sinks) && i < own_rows;
      const float sink = sink_of(p, work.h), offset = has_offset ? last.lse_offset(warp_first + i) : 0.0f;
      const WithSink with(rows.m[r], sink, offset);
      float lse = with.lse(sum[r]) + offset;
      if (with.sink != 0.0f) {
        const float by = with.keys * rcp(with.total(divisor[r]));
        inverse[r] = by * last.gain, share[r] = by * divisor[r];
      }
      bool empty = false;
      if (!(sum[r] > 0.0f)) {  // a row that sees no key gets zeros; one whose scores are all -inf, or NaN, gets NaN
        const KeyRange keys = work.mask.visible(work.row0 + warp_first + i);
        empty = keys.begin == keys.end;
      }
      if (empty) {
        lse = sink, inverse[r] = 1.0f, share[r] = 0.0f;
#pragma unroll
        for (int j = 0; j < kOTiles; ++j) O[0][j][2 * r] = O[0][j][2 * r + 1] = 0.0f;
      }
      if (p.lse && lane % 4 == 0 && i < own_rows) p.lse[work.lse_at + warp_first + i] = lse;
    }
  }
#pragma unroll
  for (int j = 0; j < kOTiles; ++j) {
    const float2 added = last.mean(j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = O[0][j][e], by = inverse[e / 2], mean = (e % 2 ? added.y : added.x) * share[e / 2];
      O[0][j][e] = Last::kMean ? fmaf(x, by, mean) : x * by;
    }
  }
  using Element = typename Config::Element;
  hold_within<Element>(O);
  Element* const g_own =
      static_cast<Element*>(p.out.data) + work.out_at + warp_first * p.out.stride_t;  // the warp's first row
  if constexpr (kPanelBytes > 0) {
    const WarpRows<Config, kPanelBytes> through{s_rows, uint32_t(lane)};
    through.put(O);
    if (!unlikely(!aligned || own_rows < 16))
      through.store_all(g_own, p.out.stride_t, p.head_dim);
    else
      through.store(g_own, p.out.stride_t, own_rows, p.head_dim, aligned);
  } else {
    store_rows<Config>(
        O, [&](int i) { return i < own_rows ? g_own + i * p.out.stride_t : nullptr; }, p.head_dim, aligned, lane);
  }
  if (!unlikely(work.v_cleared)) return;
  __syncwarp();  // other lanes change what this one stored
  for (int key0 = work.keys.begin; key0 < work.keys.end; key0 += Config::kBlockN)
    if (!work.whole(key0))
      add_nonfinite_at([&](int i, int d) -> Element& { return g_own[i * p.out.stride_t + d]; }, work.row0 + warp_first,
                       own_rows, p.head_dim, key0, Config::kBlockN, work.mask, lane,
                       [&](int key, int d) { return last.value(key, d); });
}

// All consumer threads, for rows that they fill together.
template <class Config>
struct AllConsumers {
  __device__ static __forceinline__ int thread() { return fresh_tid() - kWarpgroupThreads; }
  __device__ static __forceinline__ int threads() { return Config::kConsumers * kWarpgroupThreads; }
};

// Rows of a work tile that sees no key: zeros, and lse of their sink, or -inf.
template <class Config>
__device__ inline void store_empty_rows(const QfAttnParams& p, const WorkTile<Config>& work) {
  using By = AllConsumers<Config>;
  const int rows = min(Config::kBlockM, work.seq.len_q - work.row0);
  for (int i = By::thread(); i < rows; i += By::threads()) {
    const int64_t row = work.seq.q0 + work.row0 + i;
    auto* const g_row = static_cast<typename Config::Element*>(p.out.data) + work.b * p.out.stride_b +
                        work.h * p.out.stride_h + row * p.out.stride_t;
    for (int d = 0; d < p.head_dim; ++d) g_row[d].bits = 0;
    if (p.lse) p.lse[work.b * p.lse_stride_b + work.h * p.lse_stride_h + row] = sink_of(p, work.h);
  }
}

}  // namespace wgmma
}  // namespace qf
