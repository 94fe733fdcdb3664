// Loads the queries of a unit into shared memory as the products read them: rotated where rope is given, and quantized
// where K is in bytes. Kernels do this when they load q: a separate launch that stored a rotated copy of so few rows
// would take longer than doing it here.
#pragma once

#include "attn/decode/int8_queries.cuh"
#include "attn/decode/product.cuh"
#include "attn/decode/unit.cuh"
#include "attn/mma/tile.cuh"
#include "ptx/mov.cuh"
#include "quant/tokens.cuh"

namespace qf {
namespace decode {

// A row of q, from channel d on as quantize_queries() reads it. What is rotated is rounded to q's type, as by a
// separate pass before the attention, but not for KV from quantize_kv: there a row is multiplied by the Hadamard matrix
// and rounded to the integers of docs/kernels/sm90_quantize.md without rounding in between.
template <class Config>
struct QueryRow {
  using Element = typename Config::Element;
  using Tensor = typename Config::QueryTensor;
  const QfAttnParams& p;
  const Aligned& aligned;
  const Element* g_row;
  int position, d;

  __device__ __forceinline__ QueryRow operator+(int column) const { return {p, aligned, g_row, position, column}; }
  // For bytes: channels d .. d + 15, with zeros past the last.
  __device__ __forceinline__ void load(float (&x)[16]) const {
    const bool rotates = p.rope.cos && d < p.rope.rotary_dim;
    uint4 chunks[2];
    if (!Config::kKept && rotates && halves_are_chunks()) {
      const int half = p.rope.rotary_dim / 2;
      const Rotation rotation = rotation_at(p.rope, position);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = d + i * kPerChunk;
        const bool upper = channel >= half;
        const int partner = upper ? channel - half : channel + half;
        const EightPairs pairs(p.rope, {rotation.row, upper ? rotation.sign : -rotation.sign}, min(channel, partner));
        chunks[i] = rotated<true>(load_chunk(g_row + channel, true), load_chunk(g_row + partner, true), pairs);
      }
      unpack(chunks, x);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) chunks[i] = chunk(d + i * kPerChunk);
    unpack(chunks, x);
    if (!rotates) return;
    rotate(x);
    if constexpr (!Config::kKept) {
      pack(x, chunks);
      unpack(chunks, x);
    }
  }
  // For 16 bits: two chunks, the n-th two of a row, and their indices. Where possible, they are partners.
  __device__ __forceinline__ void load(uint4 (&chunks)[2], int (&which)[2], int n) const {
    const int half_chunks = p.rope.rotary_dim / (2 * kPerChunk);
    const bool halves = halves_are_chunks();
    if (halves && n < half_chunks) {
      which[0] = n, which[1] = n + half_chunks;
      const Element* const g_chunk = g_row + n * kPerChunk;
      const uint4 x = load_chunk(g_chunk, true), y = load_chunk(g_chunk + half_chunks * kPerChunk, true);
      const EightPairs pairs(p.rope, rotation_at(p.rope, position), n * kPerChunk);
      chunks[0] = rotated<false>(x, y, pairs);
      chunks[1] = rotated<true>(y, x, pairs);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) chunks[i] = chunk(which[i] * kPerChunk);
    if (halves || 2 * n * kPerChunk >= p.rope.rotary_dim) return;
    float x[16];
    unpack(chunks, x);
    (*this + 2 * n * kPerChunk).rotate(x);
    pack(x, chunks);
  }

 private:
  __device__ __forceinline__ uint4 chunk(int channel) const {
    return channel < p.head_dim ? load_chunk(g_row + channel, aligned.q) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ static void unpack(const uint4 (&chunks)[2], float (&x)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const uint4& raw = chunks[i / 8];
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      x[i] = Tensor::low(words[i % 8 / 2]), x[i + 1] = Tensor::high(words[i % 8 / 2]);
    }
  }
  __device__ __forceinline__ static void pack(const float (&x)[16], uint4 (&chunks)[2]) {
    const auto word = [&](int i) { return Tensor::pair(x[i], x[i + 1]); };
#pragma unroll
    for (int i = 0; i < 2; ++i) chunks[i] = make_uint4(word(8 * i), word(8 * i + 2), word(8 * i + 4), word(8 * i + 6));
  }
  // As in most models: rows and tables are read 16 bytes at a time, and half a rotation is a whole number of chunks.
  // Then all loads are issued before the first is waited for.
  __device__ __forceinline__ bool halves_are_chunks() const {
    return aligned.q && aligned.rope && !p.rope.interleaved && p.rope.rotary_dim % (2 * kPerChunk) == 0;
  }
  // Rotates x, whose partners are y; kUpper: x is of the second half.
  template <bool kUpper>
  __device__ __forceinline__ static uint4 rotated(const uint4& x, const uint4& y, const EightPairs& pairs) {
    const auto word = [&](uint32_t a, uint32_t b, int e) {
      const float s0 = kUpper ? pairs.sine[e] : -pairs.sine[e], s1 = kUpper ? pairs.sine[e + 1] : -pairs.sine[e + 1];
      return Tensor::pair(fmaf(Tensor::low(b), s0, Tensor::low(a) * pairs.cosine[e]),
                          fmaf(Tensor::high(b), s1, Tensor::high(a) * pairs.cosine[e + 1]));
    };
    return make_uint4(word(x.x, y.x, 0), word(x.y, y.y, 2), word(x.z, y.z, 4), word(x.w, y.w, 6));
  }
  // Any rotation. The warp that loads queries has few registers: four channels at a time are read, one by one and
  // behind a branch, and their addresses are recomputed for every row. All but the first four come from L1.
  __device__ __forceinline__ void rotate(float (&x)[16]) const {
    const QfRope& rope = p.rope;
    const Rotation rotation = rotation_at(rope, position);
    const int half = rope.rotary_dim / 2;
    const int64_t table_row = int64_t(rotation.row) * half;
    const auto entry = [&](const float* g_table, int pair) {
      return rotation.row < 0 ? nan() : g_table[table_row + pair];
    };
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int first = int(fresh(uint32_t(d + i)));
      if (first >= rope.rotary_dim) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int channel = first + e;
        const bool upper = rope.interleaved ? e % 2 == 1 : channel >= half;
        const int pair = rope.interleaved ? channel / 2 : upper ? channel - half : channel;
        const int partner = rope.interleaved ? channel ^ 1 : upper ? pair : channel + half;
        if (channel < rope.rotary_dim) {
          const float sine = mul_rn(upper ? rotation.sign : -rotation.sign, entry(rope.sin, pair));
          const float cosine = entry(rope.cos, pair), other = to_float(g_row[partner]);
          // Each product is rounded, and then their sum, as in quant/tokens.cuh; or as rope4() rounds.
          x[i + e] = Config::kKept ? add_rn(mul_rn(x[i + e], cosine), mul_rn(other, sine))
                                   : fmaf(other, sine, x[i + e] * cosine);
        }
      }
    }
  }
};

// Copies rows unchanged, swizzled: zeros past the last row and channel. By threads `thread` of `threads`.
template <class Config>
__device__ __forceinline__ void copy_queries(const QfAttnParams& p, const Part& part, bool aligned, char* s_queries,
                                             int thread, int threads) {
  using Element = typename Config::Element;
  constexpr int kAll = Config::kRows * Config::kChunks;
  const unsigned group = unsigned(p.q_heads / p.kv_heads);
  const unsigned reciprocal = 65536u / group + 1;  // row / group is row * reciprocal / 65536 for rows up to 64
  const auto copy = [&](int i, bool whole) {
    const int row = i / Config::kChunks, chunk = i % Config::kChunks, d = chunk * kPerChunk;
    const int token = int(row * reciprocal >> 16), head = int(part.kv_head * group) + row - token * int(group);
    const Element* const g_chunk =
        static_cast<const Element*>(p.q.data) + part.b * p.q.stride_b + token * p.q.stride_t + head * p.q.stride_h + d;
    uint4 value = {0, 0, 0, 0};
    if (token < p.q_len && d < p.head_dim) value = load_chunk(g_chunk, whole);
    *reinterpret_cast<uint4*>(s_queries + Swizzle<Config::kChunks>::offset(row, chunk)) = value;
  };
  if (aligned) {
#pragma unroll 4
    for (int i = thread; i < kAll; i += threads) copy(i, true);
  } else {
#pragma unroll 1
    for (int i = thread; i < kAll; i += threads) copy(i, false);
  }
}

// Loads the queries of a part's unit: row = token * group + head of the group. By whole warps: threads `thread` of
// `threads`.
template <class Config>
__device__ __forceinline__ void fetch_queries(const QfAttnParams& p, const Aligned& aligned, const Part& part,
                                              char* s_queries, int thread, int threads) {
  using Element = typename Config::Element;
  if (!Config::kInt8Queries && !p.rope.cos) {
    copy_queries<Config>(p, part, aligned.q, s_queries, thread, threads);
    return;
  }
  const int group = p.q_heads / p.kv_heads, rows = p.q_len * group, keys = p.kv_lens ? p.kv_lens[part.b] : p.k_len;
  const auto row_at = [&](int row) {
    const int token = row / group, head = part.kv_head * group + row - token * group;
    const Element* const g_row =
        static_cast<const Element*>(p.q.data) + part.b * p.q.stride_b + token * p.q.stride_t + head * p.q.stride_h;
    const int position = p.rope.cos ? position_q(p.rope, part.b, 0, token, p.q_len, keys) : 0;
    return QueryRow<Config>{p, aligned, g_row, position, 0};
  };
  if constexpr (Config::kInt8Queries) {
    const int64_t mean = (Config::kKept ? int64_t(part.b) * p.kv_heads : 0) + part.kv_head;  // per sequence, if kKept
    const float* const g_mean = wants_dot_k_mean(p) ? p.kv.k_mean + mean * p.head_dim : nullptr;
    quantize_queries<Config>(rows, p.head_dim, row_at, g_mean, s_queries, thread, threads);
  } else {
    constexpr int kPairs = Config::kChunks / 2;  // pairs of chunks in a row
#pragma unroll 1
    for (int i = thread; i < Config::kRows * kPairs; i += threads) {
      const int row = i / kPairs, n = i % kPairs;
      uint4 chunks[2] = {};
      int which[2] = {2 * n, 2 * n + 1};
      if (row < rows) row_at(row).load(chunks, which, n);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        *reinterpret_cast<uint4*>(s_queries + Swizzle<Config::kChunks>::offset(row, which[e])) = chunks[e];
    }
  }
}

// Are queries loaded with a unit's description? When the share is done, finishing the rows of the unit that is merged
// last needs their products with K's mean.
template <class Config>
__device__ __forceinline__ bool wants_queries(const QfAttnParams& p, const Unit<Config>& unit) {
  return unit.tiles >= 0 || (Config::kInt8Queries && unit.part.parts > 0 && wants_dot_k_mean(p));
}

}  // namespace decode
}  // namespace qf
