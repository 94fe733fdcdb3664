// Tokens of a tensor to be quantized: which exist, their positions, and eight channels of one, loaded and rotated.
//
// Rotation here rounds each product and then their sum, like the CPU engine, so that all engines give the same
// integers; rope.cuh, for attention in floats, uses fmas.
#pragma once

#include "attn/rope.cuh"
#include "common/elements.cuh"
#include "common/rounded.cuh"
#include "qflash_ops.h"

namespace qf {

// One sequence of the batch. An invalid description (see sequence.cuh) makes every token nonfinite, and none is read.
struct Tokens {
  int64_t first;   // its token 0 in x; 0 unless packed
  int owned, len;  // tokens that have a place in `values`; tokens that exist
  int64_t shift;   // a query's position less its index
  bool good;
};

__device__ inline Tokens read_tokens(const QfQuantizeParams& p, int b) {
  Tokens s = {0, p.length, p.length, 0, true};
  if (p.cu_seqlens) {
    const int64_t begin = p.cu_seqlens[b], end = p.cu_seqlens[b + 1];
    s.good = begin >= 0 && begin <= end && end <= p.total && end - begin <= p.length;
    s.first = s.good ? begin : 0;
    s.owned = s.len = s.good ? int(end - begin) : 0;
  }
  if (p.queries) {
    int64_t len_k = p.key_length;
    if (p.cu_seqlens_k) len_k = int64_t(p.cu_seqlens_k[b + 1]) - p.cu_seqlens_k[b];
    if (p.key_lens) len_k = p.key_lens[b];
    s.shift = len_k - s.owned;
  }
  if (p.lens) {
    const int len = p.lens[b];
    s.good = s.good && len >= 0 && len <= s.owned;
    s.len = s.good ? len : 0;
  }
  return s;
}

__device__ __forceinline__ int64_t position_of(const QfQuantizeParams& p, const Tokens& s, int b, int t) {
  const int32_t* positions = p.queries ? p.rope.positions_q : p.rope.positions_k;
  const int64_t stride = p.queries ? p.rope.stride_positions_q_b : p.rope.stride_positions_k_b;
  return positions ? positions[b * stride + s.first + t] : t + s.shift;
}

template <class Element>
__device__ __forceinline__ const Element* token_row(const QfQuantizeParams& p, const Tokens& s, int b, int h, int t) {
  return static_cast<const Element*>(p.x.data) + b * p.x.stride_b + (s.first + t) * p.x.stride_t + h * p.x.stride_h;
}

// Eight elements as stored in memory.
template <class Element>
struct Raw8 {
  uint4 bits;
};
template <>
struct Raw8<float> {
  float4 low, high;
};

__device__ __forceinline__ void load_vector(Raw8<float>& raw, const float* g) {
  raw.low = *reinterpret_cast<const float4*>(g);
  raw.high = *reinterpret_cast<const float4*>(g + 4);
}
template <class Element>
__device__ __forceinline__ void load_vector(Raw8<Element>& raw, const Element* g) {
  raw.bits = *reinterpret_cast<const uint4*>(g);
}

__device__ __forceinline__ void pack8(Raw8<float>& raw, const float (&x)[8]) {
  raw.low = make_float4(x[0], x[1], x[2], x[3]), raw.high = make_float4(x[4], x[5], x[6], x[7]);
}
template <class Element>
__device__ __forceinline__ void pack8(Raw8<Element>& raw, const Element (&x)[8]) {
  const auto two = [&](int i) { return uint32_t(x[i].bits) | uint32_t(x[i + 1].bits) << 16; };
  raw.bits = make_uint4(two(0), two(2), two(4), two(6));
}

// Channels d .. d+7 of a row; zeros from head_dim on. `vector`: aligned to full vectors, and 8 divides head_dim.
template <class Element>
__device__ __forceinline__ Raw8<Element> load8(const Element* g_row, int d, int head_dim, bool vector) {
  Raw8<Element> raw{};
  if (vector) {
    if (d < head_dim) load_vector(raw, g_row + d);
  } else {
    Element x[8] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (d + e < head_dim) x[e] = g_row[d + e];
    pack8(raw, x);
  }
  return raw;
}

__device__ __forceinline__ void to_float8(float (&x)[8], const Raw8<float>& raw) {
  x[0] = raw.low.x, x[1] = raw.low.y, x[2] = raw.low.z, x[3] = raw.low.w;
  x[4] = raw.high.x, x[5] = raw.high.y, x[6] = raw.high.z, x[7] = raw.high.w;
}
template <class Element>
__device__ __forceinline__ void to_float8(float (&x)[8], const Raw8<Element>& raw) {
  const uint32_t words[4] = {raw.bits.x, raw.bits.y, raw.bits.z, raw.bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float(Element{uint16_t(words[i])});
    x[2 * i + 1] = to_float(Element{uint16_t(words[i] >> 16)});
  }
}

// May the tables, and a rotated channel's partner, be read eight at a time? Host side.
inline bool rotate_vectorises(const QfRope& rope) {
  const bool aligned = (reinterpret_cast<uintptr_t>(rope.cos) | reinterpret_cast<uintptr_t>(rope.sin)) % 16 == 0;
  return aligned && rope.rotary_dim % (rope.interleaved ? 8 : 16) == 0;
}

// Channels d .. d+7 (x, d a multiple of 8) of the row at g_row, rotated. A position outside the table makes them NaN,
// and thus the token. `vector`: load8's condition and rotate_vectorises.
template <class Element>
__device__ __forceinline__ void rotate8(float (&x)[8], const QfRope& rope, const Element* g_row, int d, int head_dim,
                                        int64_t position, bool vector) {
  const int64_t row = position < 0 ? -position : position;
  if (row >= rope.rows) {
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = nan();
    return;
  }
  if (d >= rope.rotary_dim) return;
  const int half = rope.rotary_dim / 2;
  const float* g_cos = rope.cos + row * half;
  const float* g_sin = rope.sin + row * half;
  const float sign = position < 0 ? -1.0f : 1.0f;
  float cosine[8], sine[8], partner[8];  // x <- x * cosine + partner * sine
  if (rope.interleaved) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      partner[e] = x[e ^ 1];
      cosine[e] = 1.0f, sine[e] = 0.0f;
    }
    if (vector) {
      const float4 c = *reinterpret_cast<const float4*>(g_cos + d / 2);
      const float4 s = *reinterpret_cast<const float4*>(g_sin + d / 2);
      cosine[0] = c.x, cosine[2] = c.y, cosine[4] = c.z, cosine[6] = c.w;
      sine[0] = s.x, sine[2] = s.y, sine[4] = s.z, sine[6] = s.w;
    } else {
#pragma unroll
      for (int e = 0; e < 8; e += 2)
        if (d + e < rope.rotary_dim) cosine[e] = g_cos[(d + e) / 2], sine[e] = g_sin[(d + e) / 2];
    }
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      cosine[e + 1] = cosine[e], sine[e + 1] = mul_rn(sign, sine[e]);
      sine[e] = -sine[e + 1];
      if (d + e >= rope.rotary_dim) partner[e] = partner[e + 1] = 0.0f;  // sine 0 times an infinity would be NaN
    }
  } else if (vector) {
    const bool upper = d >= half;
    const int pair = upper ? d - half : d;
    to_float8(partner, load8(g_row, upper ? pair : d + half, head_dim, true));
    Raw8<float> c, s;
    load_vector(c, g_cos + pair), load_vector(s, g_sin + pair);
    to_float8(cosine, c), to_float8(sine, s);
#pragma unroll
    for (int e = 0; e < 8; ++e) sine[e] = mul_rn(upper ? sign : -sign, sine[e]);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int channel = d + e;
      const bool rotates = channel < rope.rotary_dim, upper = channel >= half;
      const int pair = upper ? channel - half : channel;
      partner[e] = rotates ? to_float(g_row[upper ? pair : channel + half]) : 0.0f;
      cosine[e] = rotates ? g_cos[pair] : 1.0f;
      sine[e] = rotates ? mul_rn(upper ? sign : -sign, g_sin[pair]) : 0.0f;
    }
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = add_rn(mul_rn(x[e], cosine[e]), mul_rn(partner[e], sine[e]));
}

}  // namespace qf
