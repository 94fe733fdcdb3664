// Sixteen channels of kRounds neighbouring tokens in a thread's registers: loaded, rotated, mixed, rounded.
//
// A lane's sixteen channels are one block of the Hadamard matrix, so that butterflies need no other lane; the lanes of
// a token are neighbours; so are the tokens of a lane, so that scales are stored in full lines.
#pragma once

#include "ptx/ldst.cuh"
#include "ptx/max.cuh"
#include "quant/hadamard.cuh"
#include "quant/round.cuh"
#include "quant/sm90/params.cuh"
#include "quant/tokens.cuh"

namespace qf {
namespace sm90_quantize {

template <class Element>
struct Raw16 {
  Raw8<Element> part[2];
};

// Channels d .. d+7 of a token, rotated with their partners half a rotary_dim away. A position outside the tables makes
// them NaN.
template <class Element>
__device__ __forceinline__ void rotate_halves(float (&x)[8], const Raw8<Element>& partner, const QfRope& rope, int d,
                                              const Rotation& rotation) {
  const int half = rope.rotary_dim / 2;
  const bool upper = d >= half;
  const uint32_t at = uint32_t(max(rotation.row, 0)) * half + (upper ? d - half : d);  // below 2^31: the host checks
  Raw8<float> raw_cosine, raw_sine;
  load_vector(raw_cosine, rope.cos + at), load_vector(raw_sine, rope.sin + at);
  float cosine[8], sine[8], y[8];
  to_float8(cosine, raw_cosine), to_float8(sine, raw_sine), to_float8(y, partner);
  const float sign = rotation.row < 0 ? nan() : upper ? rotation.sign : -rotation.sign;
  // Both products are rounded; multiplying the second by a sign is exact, so that the fma is their sum.
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = fmaf(mul_rn(y[e], sine[e]), sign, mul_rn(x[e], cosine[e]));
}

// raw <- channels column .. column+15 of the first `existing` of kRounds tokens, as stored in memory.
template <Reads kReads, class Element>
__device__ __forceinline__ void load_raw(Raw16<Element> (&raw)[kRounds], const Element* g_row, int64_t stride_t,
                                         int existing, int column, int head_dim, bool vector) {
  const bool whole = existing >= kRounds && column + 16 <= head_dim;  // nearly always: no further checks then
  if (kReads != Reads::kAny && whole) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) load_vector(raw[r].part[i], g_row + r * stride_t + column + 8 * i);
    return;
  }
#pragma unroll
  for (int r = 0; r < kRounds; ++r)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[r].part[i] = Raw8<Element>{};
      if (r < existing) raw[r].part[i] = load8(g_row + r * stride_t, column + 8 * i, head_dim, vector);
    }
}

// x[r] <- channels column .. column+15 of token r of those at g_row, the first `existing` of kRounds; zeros past
// head_dim and if there is no token. position(r): the position of token r.
template <Reads kReads, class Element, class Position>
__device__ __forceinline__ void load_tokens(float (&x)[kRounds][16], const QfAttnParams& p, const Deal& deal,
                                            const Element* g_row, int64_t stride_t, int existing, int column,
                                            Position position) {
  Raw16<Element> raw[kRounds];
  load_raw<kReads>(raw, g_row, stride_t, existing, column, p.head_dim, kReads != Reads::kAny || deal.vector);
  const auto eight = [&](int r, int i) -> float (&)[8] { return *reinterpret_cast<float (*)[8]>(&x[r][8 * i]); };
  const auto unpack = [&] {
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) to_float8(eight(r, i), raw[r].part[i]);
  };
  if constexpr (kReads == Reads::kVectors) {
    unpack();
  } else if constexpr (kReads == Reads::kHalves) {
    const int half = p.rope.rotary_dim / 2;
    Raw16<Element> partner[kRounds];
    const auto load_partner = [&](int r, int i) {
      const int d = column + 8 * i;
      load_vector(partner[r].part[i], g_row + r * stride_t + (d >= half ? d - half : d + half));
    };
    const auto rotation_of = [&](int r) { return rotation_at(p.rope, position(r)); };
    if (existing >= kRounds && column + 16 <= p.rope.rotary_dim) {  // nearly always
      unpack();
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const Rotation rotation = rotation_of(r);
        load_partner(r, 0), load_partner(r, 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) rotate_halves(eight(r, i), partner[r].part[i], p.rope, column + 8 * i, rotation);
      }
    } else {
      unpack();
#pragma unroll
      for (int r = 0; r < kRounds; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (r < existing && column + 8 * i < p.rope.rotary_dim) {
            load_partner(r, i);
            rotate_halves(eight(r, i), partner[r].part[i], p.rope, column + 8 * i, rotation_of(r));
          }
    }
  } else {
    unpack();
    if (!p.rope.cos) return;
#pragma unroll
    for (int r = 0; r < kRounds; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (r < existing)
          rotate8(eight(r, i), p.rope, g_row + r * stride_t, column + 8 * i, p.head_dim, position(r),
                  deal.vector && deal.table_vectors);
  }
}

// Floats of a head, from `column` on, zeros past its end.
template <int kChannels>
__device__ __forceinline__ void load_mean(float (&mean)[kChannels], const float* g_head, int column, int head_dim) {
#pragma unroll
  for (int i = 0; i < kChannels / 4; ++i) {
    const int d = column + 4 * i;
    const float4 four = d < head_dim ? *reinterpret_cast<const float4*>(g_head + d) : make_float4(0, 0, 0, 0);
    mean[4 * i] = four.x, mean[4 * i + 1] = four.y, mean[4 * i + 2] = four.z, mean[4 * i + 3] = four.w;
  }
}

// The largest magnitude; NaN if there is one.
__device__ __forceinline__ float largest_of(const float (&x)[16]) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < 16; ++i) largest = max_nan(largest, fabsf(x[i]));
  return largest;
}

__device__ __forceinline__ bool is_finite(float magnitude) { return magnitude < infinity(); }

// Combines one number per round over the lanes of a token: lane l gets the result of round l % 4, and combines with its
// neighbour first, then with the next pair, and so on.
template <int kLanes, class Combine>
__device__ __forceinline__ float reduce_rounds(const float (&m)[kRounds], int lane, Combine combine) {
  static_assert(kRounds == 4 && kLanes >= 4, "rounds are dealt out to four lanes");
  const bool odd = lane & 1, upper = lane & 2;
  const auto exchange = [](float x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); };
  const float low = combine(odd ? m[1] : m[0], exchange(odd ? m[0] : m[1], 1));
  const float high = combine(odd ? m[3] : m[2], exchange(odd ? m[2] : m[3], 1));
  float result = combine(upper ? high : low, exchange(upper ? low : high, 2));
#pragma unroll
  for (int step = 4; step < kLanes; step *= 2) result = combine(result, exchange(result, step));
  return result;
}

// For butterflies whose largest magnitude is `largest`: the scale of x's integers, and the factor that butterflies are
// multiplied by.
__device__ __forceinline__ Scale scale_of(float largest) {
  const float amplitude = mul_rn(0.25f, largest);
  if (amplitude < kNoAmplitude) return {0.0f, 0.0f, 0.0f};
  return {div_rn(amplitude, 127.0f), div_rn(127.0f, largest), 0.0f};
}

// Random numbers for stochastic rounding, if wanted.
struct Draws {
  bool wanted;
  uint64_t seed;
};

// Sixteen integers. Nearest: rounds the exact product, which is below 127.5. `element`: index of the first among all
// integers of the tensor, a multiple of 16.
template <Reads kReads>
__device__ __forceinline__ Word4 round16(const float (&x)[16], float inverse, const Draws& draws, uint64_t element) {
  Word4 bytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float n[4];
    if (kReads == Reads::kAny && draws.wanted) {
      uint32_t random[4];
      philox4<true>(random, element + 4 * i, draws.seed);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float rounded = round_stochastically(mul_rn(x[4 * i + e], inverse), random[e]);
        n[e] = fminf(fmaxf(rounded, -127.0f), 127.0f) + kIntegerInLowBits;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) n[e] = fmaf(x[4 * i + e], inverse, kIntegerInLowBits);
    }
    bytes.word[i] = pack_low_bytes(float_to_bits(n[0]), float_to_bits(n[1]), float_to_bits(n[2]), float_to_bits(n[3]));
  }
  return bytes;
}

// Integers of nonfinite tokens.
constexpr uint32_t kNonfiniteBytes = 0x80808080u;

// Stores sixteen integers or, unless `keep`, `fill` instead.
__device__ __forceinline__ void store16(int8_t* g_to, const Word4& bytes, bool keep, uint32_t fill) {
  Word4 y;
#pragma unroll
  for (int i = 0; i < 4; ++i) y.word[i] = keep ? bytes.word[i] : fill;
  *reinterpret_cast<Word4*>(g_to) = y;
}

}  // namespace sm90_quantize
}  // namespace qf
