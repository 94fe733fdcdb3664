// Values to E4M3, with their mean subtracted, and transposed: tiles of 128 tokens, each with an exponent of its own.
//
// Keys are permuted in every 16: word t of channel d holds keys 2t, 2t+1, 2t+8, 2t+9, the order of MMA accumulators in
// a warp. So a thread loads its eight channels of those four tokens, and converts whole words: no byte moves between
// threads. Words go through shared memory, so that each channel is stored as a line of 128 bytes.
//
// Banks: word w of channel c lies at 32 c + (w ^ f(c)), f(c) = 4 (c / 8 % 8) + g(c / 64) with g(n) = n 256 / kHeadDim.
//   writing  a warp's lanes have chunks c / 8 = j of kHeadDim / 8 and as many different w % n that n times those are
//            32; without f all j would fall into one bank (8 c words apart: 8- to 32-way conflicts), with it j % 8 sets
//            bits 2 to 4 of the bank, and j / 8 and w the bits below: 32 banks
//   reading  eight lanes read the 128 bytes of one channel, 16 each: 4 (c / 8 % 8) permutes those, g words within one
#pragma once

#include "ptx/cvt.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/min.cuh"
#include "quant/sm90/tokens.cuh"

namespace qf {
namespace sm90_quantize {

// On pairs as stored in memory: of a NaN and a number, the number.
__device__ __forceinline__ uint32_t most_of(uint32_t a, uint32_t b, F16) { return max_f16x2(a, b); }
__device__ __forceinline__ uint32_t most_of(uint32_t a, uint32_t b, BF16) { return max_bf16x2(a, b); }
// Of a NaN and a number, NaN.
__device__ __forceinline__ uint32_t least_of(uint32_t a, uint32_t b, F16) { return min_nan_f16x2(a, b); }
__device__ __forceinline__ uint32_t least_of(uint32_t a, uint32_t b, BF16) { return min_nan_bf16x2(a, b); }

__device__ __forceinline__ uint32_t greater(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The maximum over the block. s_slots: a word for every warp.
template <int kWarps>
__device__ __forceinline__ uint32_t largest_of_block(uint32_t value, uint32_t* s_slots) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = greater(value, __shfl_xor_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) s_slots[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) value = greater(value, s_slots[w]);
  __syncthreads();
  return value;
}

// The lowest e >= 0 with amplitude / 2^exponent / 2^e <= 448 = 1.75 * 2^8.
__device__ __forceinline__ int exponent_of_tile(float amplitude, int exponent) {
  const uint32_t bits = float_to_bits(amplitude);
  return max(0, int(bits >> 23) - 127 - exponent - 8 + int((bits & 0x7fffffu) > 0x600000u));
}

// Where the tiles of a sequence begin among those of a channel, and how many belong to it.
struct ValueTiles {
  int64_t first;
  int owned;
};

__device__ __forceinline__ int64_t padded_of(const QfAttnParams& p) {
  if (!p.cu_seqlens_k) return int64_t(p.k_len + kValueTile - 1) / kValueTile * kValueTile;
  return (p.total_k / kValueTile + p.batch + 1) * kValueTile;
}

// Packed, up to where the next one begins: everything between sequences is written.
__device__ __forceinline__ ValueTiles value_tiles(const QfAttnParams& p, const KeyRows& s, int b) {
  if (!p.cu_seqlens_k) return {0, int(padded_of(p) / kValueTile)};
  if (s.owned == 0 && p.cu_seqlens_k[b] != p.cu_seqlens_k[b + 1]) return {0, 0};
  const int64_t first = s.first / kValueTile + b;
  const int64_t end = b + 1 < p.batch ? (s.first + s.owned) / kValueTile + b + 1 : padded_of(p) / kValueTile;
  return {first, int(end - first)};
}

template <class Element, int kHeadDim>
struct ValueTile {
  using S = Shape<kHeadDim>;
  static constexpr int kSides = S::kThreads / S::kChunks;  // quads that are loaded at once
  static constexpr int kQuads = kValueTile / 4 / kSides;   // of four keys each, of a thread
  static constexpr int kReadChannels = S::kThreads / 8;    // channels that are written at once
  static constexpr int kTwist = 256 / kHeadDim;            // g(1)

  __device__ static __forceinline__ int twist(int c) { return 4 * (c / 8 % 8) + c / 64 * (kTwist & 3); }
  // Token r of quad `quad`; and the distance from token r of a thread's i-th quad to its first token.
  __device__ static __forceinline__ int token(int quad, int r) { return quad / 4 * 16 + quad % 4 * 2 + ahead(0, r); }
  __device__ static constexpr int ahead(int i, int r) { return 4 * kSides * i + (r & 1) + (r & 2) * 4; }
};

// Error feedback: the errors that rounding left in a chain of keys of one channel, and their effect on the next two
// keys, which are moved against the sum of the errors, by a quarter of it and by a quarter of their own last place at
// most. Values that E4M3 can represent stay unchanged, and errors grow little; but they no longer add up, and the error
// that all keys of a channel have in common is what attention does not average out.
struct Chain {
  float error = 0.0f;

  // E4M3 of x0 and x1, the former in the lower byte. kMayBeNan: they may be NaN.
  template <bool kMayBeNan, bool kFirst, bool kLast>
  __device__ __forceinline__ uint32_t round(float x0, float x1) {
    float y0 = x0, y1 = x1;
    if (!kFirst) {
      const float most = mul_rn(8.0f, fabsf(error)), sign = copysignf(0x1p-5f, error);
      const auto power = [](float x) { return bits_to_float(float_to_bits(x) & 0x7f800000u); };  // of two, <= |x|
      y0 = fmaf(fminf(most, power(x0)), sign, x0);
      y1 = fmaf(fminf(most, power(x1)), sign, x1);
    }
    const uint32_t codes = cvt_rn_e4m3x2_f32(y0, y1);
    if (!kLast) {
      const uint32_t pair = cvt_rn_f16x2_e4m3x2(codes);
      const float error0 = sub_rn(x0, cvt_f32_f16(uint16_t(pair))),
                  error1 = sub_rn(x1, cvt_f32_f16(uint16_t(pair >> 16)));
      error = add_rn(error, kMayBeNan && x0 != x0 ? 0.0f : error0);
      error = add_rn(error, kMayBeNan && x1 != x1 ? 0.0f : error1);
    }
    return codes;
  }
};

// Channel e of eight that are packed in four words.
template <class Element>
__device__ __forceinline__ float value_of(const uint32_t (&words)[4], int e) {
  return to_float(Element{uint16_t(words[e / 2] >> 16 * (e % 2))});
}

// Converts raw, with the mean subtracted, to words of E4M3 in shared memory. A chain is two quads sixteen apart, in the
// order of their words. kGeneral: some may be NaN, only the first `existing` tokens exist, or the mean is too large.
template <class Element, int kHeadDim, bool kGeneral>
__device__ __forceinline__ void convert_values(uint32_t* s_words,
                                               const uint32_t (&raw)[ValueTile<Element, kHeadDim>::kQuads][4][4],
                                               const float (&mean)[8], float inverse, int existing, int chunk,
                                               int side) {
  using T = ValueTile<Element, kHeadDim>;
  constexpr int kApart = 16 / T::kSides;
#pragma unroll
  for (int i = 0; i < kApart; ++i)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const auto value = [&](int quad, int r) {
        const float x = value_of<Element>(raw[quad][r], e);
        if (kGeneral) return T::ahead(quad, r) >= existing ? 0.0f : mul_rn(sub_rn(x, mean[e]), inverse);
        return fmaf(x, inverse, -mul_rn(mean[e], inverse));  // the same: inverse is a power of two
      };
      const auto store = [&](int quad, uint32_t word) {
        const int c = 8 * chunk + e;
        s_words[32 * c + (side + T::kSides * quad ^ T::twist(c))] = word;
      };
      const int j = i + kApart;
      Chain chain;
      uint32_t low = chain.round<kGeneral, true, false>(value(i, 0), value(i, 1));
      uint32_t high = chain.round<kGeneral, false, false>(value(i, 2), value(i, 3));
      store(i, low | high << 16);
      low = chain.round<kGeneral, false, false>(value(j, 0), value(j, 1));
      high = chain.round<kGeneral, false, true>(value(j, 2), value(j, 3));
      store(j, low | high << 16);
    }
}

template <class Element, int kHeadDim, Reads kReads>
__device__ __forceinline__ void quantize_values(const QuantizeAll& all, const Deal& deal, uint32_t index,
                                                uint32_t* s_words) {
  using S = Shape<kHeadDim>;
  using T = ValueTile<Element, kHeadDim>;
  const QfAttnParams& p = all.attn;
  const TokenTile work(deal.v, index, p.kv_heads);
  const KeyRows s = read_key_rows(p, work.b);
  const ValueTiles tiles = value_tiles(p, s, work.b);
  const int chunk = threadIdx.x % S::kChunks, side = threadIdx.x / S::kChunks, d = 8 * chunk;
  const int64_t head = int64_t(work.b) * p.kv_heads + work.h_begin;
  const int exponents = (p.k_len + kValueTile - 1) / kValueTile;
  const int token0 = work.tile * kValueTile;
  if (work.tile >= tiles.owned && work.tile >= exponents) return;

  const int first = T::token(side, 0), existing = s.len - token0 - first;
  const bool whole = existing > T::ahead(T::kQuads - 1, 3);  // nearly always
  const Element* const g_row = row_of<Element>(p.kv.v, work.b, s.first + token0 + first, work.h_begin);
  Raw8<Element> eight[T::kQuads][4];
  if (kReads != Reads::kAny && whole && d < p.head_dim) {
#pragma unroll
    for (int i = 0; i < T::kQuads; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) load_vector(eight[i][r], g_row + d + T::ahead(i, r) * p.kv.v.stride_t);
  } else {
#pragma unroll
    for (int i = 0; i < T::kQuads; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        eight[i][r] = Raw8<Element>{};
        if (T::ahead(i, r) < existing)
          eight[i][r] =
              load8(g_row + T::ahead(i, r) * p.kv.v.stride_t, d, p.head_dim, kReads != Reads::kAny || deal.vector);
      }
  }
  uint32_t raw[T::kQuads][4][4];
#pragma unroll
  for (int i = 0; i < T::kQuads; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint4& bits = eight[i][r].bits;
      raw[i][r][0] = bits.x, raw[i][r][1] = bits.y, raw[i][r][2] = bits.z, raw[i][r][3] = bits.w;
    }

  // Rounded differences have the order of the values, so a channel's largest is that of its maximum or minimum.
  uint32_t most[4], least[4];
#pragma unroll
  for (int i = 0; i < T::kQuads; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t pair = raw[i][r][w];
        most[w] = i == 0 && r == 0 ? pair : most_of(most[w], pair, Element{});
        least[w] = i == 0 && r == 0 ? pair : least_of(least[w], pair, Element{});
      }
  wait_for_previous_grid();  // v_mean, v_scale, v_nonfinite
  float mean[8], amplitude = 0.0f;
  load_mean(mean, all.kv.v_mean + head * p.head_dim, d, p.head_dim);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    amplitude = max_nan(amplitude, fabsf(sub_rn(value_of<Element>(most, e), mean[e])));
    amplitude = max_nan(amplitude, fabsf(sub_rn(value_of<Element>(least, e), mean[e])));
  }
  if (!whole) amplitude = nan();  // takes the path below, which skips tokens that do not exist
  const auto largest = [&] { return bits_to_float(largest_of_block<S::kWarps>(float_to_bits(amplitude), s_words)); };
  float of_tile = largest();
  int count = 0;
  if (!is_finite(of_tile)) {
    amplitude = 0.0f;
#pragma unroll
    for (int i = 0; i < T::kQuads; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (T::ahead(i, r) >= existing) continue;
          const float x = value_of<Element>(raw[i][r], e);
          if (is_finite(fabsf(x))) {
            amplitude = fmaxf(amplitude, fabsf(sub_rn(x, mean[e])));
          } else {
            ++count;
            raw[i][r][e / 2] |= 0x7fffu << 16 * (e % 2);  // a NaN, for infinities would become 448
          }
        }
    if (count > 0) atomicAdd(all.kv.v_nonfinite + head, count);
    of_tile = largest();
  }

  const int exponent = int(float_to_bits(all.kv.v_scale[head]) >> 23) - 127;
  const int tile_exponent = exponent_of_tile(of_tile, exponent);
  if (threadIdx.x == 0 && work.tile < exponents)
    all.kv.v_exponents[head * exponents + work.tile] = float(tile_exponent);
  const float inverse = bits_to_float(uint32_t(127 - exponent - tile_exponent) << 23);
  bool plain = count == 0 && whole;
#pragma unroll
  for (int e = 0; e < 8; ++e) plain = plain && is_finite(fabsf(mul_rn(mean[e], inverse)));
  if (plain)
    convert_values<Element, kHeadDim, false>(s_words, raw, mean, inverse, existing, chunk, side);
  else
    convert_values<Element, kHeadDim, true>(s_words, raw, mean, inverse, existing, chunk, side);
  __syncthreads();
  if (work.tile >= tiles.owned) return;

  const int64_t padded = padded_of(p), plane = p.cu_seqlens_k ? work.h_begin : head;
  const int vector = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < kHeadDim / T::kReadChannels; ++i) {
    const int c = i * T::kReadChannels + int(threadIdx.x / 8);
    if (c >= p.head_dim) break;
    constexpr int kBlock = 64 / T::kReadChannels;
    const int within = i / kBlock * (T::kTwist & 3);  // of c / 64, known at compile time
    const Word4 x = *reinterpret_cast<const Word4*>(s_words + 32 * c + (4 * vector ^ 4 * (c / 8 % 8)));
    Word4 y;
#pragma unroll
    for (int w = 0; w < 4; ++w) y.word[w] = x.word[w ^ within];
    *reinterpret_cast<Word4*>(all.kv.v + (plane * p.head_dim + c) * padded + (tiles.first + work.tile) * kValueTile +
                              16 * vector) = y;
  }
}

}  // namespace sm90_quantize
}  // namespace qf
