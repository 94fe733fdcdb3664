// Rotary embedding of four neighbouring channels while they are loaded. Pairs are (p, p + rotary_dim/2) or,
// interleaved, (2p, 2p + 1). A position whose row is outside the table makes the rotated channels NaN: the scores
// of that row or key become NaN where they are seen, and no memory outside the table is read.
#pragma once

#include "common/elements.cuh"
#include "qflash.h"

namespace qf {

// Row of the table and direction of the rotation. row < 0: outside the table.
struct Rotation {
  int row;
  float sign;
};

__device__ __forceinline__ Rotation rotation_at(const QfRope& rope, int position) {
  const uint32_t row = position < 0 ? 0u - uint32_t(position) : uint32_t(position);
  return {row < uint32_t(rope.rows) ? int(row) : -1, position < 0 ? -1.0f : 1.0f};
}

// Can cos and sin be read four (half-split) or two (interleaved) at a time? Host side.
inline bool rope_tables_vectorise(const QfRope& rope) {
  const bool aligned = (reinterpret_cast<uintptr_t>(rope.cos) | reinterpret_cast<uintptr_t>(rope.sin)) % 16 == 0;
  return aligned && rope.rotary_dim % 8 == 0;
}

// Channels d .. d+3 (x) of the row at g_row, rotated. d is a multiple of 4. `vector`: the row and the tables may be
// read in vectors (load4's condition and rope_tables_vectorise).
template <class Element>
__device__ __forceinline__ float4 rope4(const QfRope& rope, const Element* g_row, int d, int head_dim, int position,
                                        float4 x, bool vector) {
  if (d >= rope.rotary_dim) return x;
  const Rotation rotation = rotation_at(rope, position);
  const int half = rope.rotary_dim / 2;
  const float* g_cos = rope.cos + int64_t(rotation.row) * half;
  const float* g_sin = rope.sin + int64_t(rotation.row) * half;
  const bool upper = d >= half;  // of four channels; per channel in the scalar path
  float c[4], s[4];              // x[e] <- x[e] * c[e] + partner[e] * s[e]
  float partner[4];
  if (rope.interleaved) {
    partner[0] = x.y, partner[1] = x.x, partner[2] = x.w, partner[3] = x.z;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const bool rotates = d + 2 * pair < rope.rotary_dim;
      const bool inside = rotates && rotation.row >= 0;
      const float cosine = inside ? g_cos[d / 2 + pair] : rotates ? nan() : 1.0f;
      const float sine = inside ? g_sin[d / 2 + pair] * rotation.sign : 0.0f;
      c[2 * pair] = c[2 * pair + 1] = cosine;
      s[2 * pair] = -sine, s[2 * pair + 1] = sine;
    }
    if (d + 2 >= rope.rotary_dim) partner[2] = partner[3] = 0.0f;  // an infinity there must not be multiplied by sine 0
  } else if (vector) {
    const float4 y = to_float4(load4(g_row, upper ? d - half : d + half, head_dim, true), g_row);
    float4 cosine = make_float4(nan(), nan(), nan(), nan()), sine = cosine;
    if (rotation.row >= 0) {
      cosine = *reinterpret_cast<const float4*>(g_cos + (upper ? d - half : d));
      sine = *reinterpret_cast<const float4*>(g_sin + (upper ? d - half : d));
    }
    const float sign = upper ? rotation.sign : -rotation.sign;
    partner[0] = y.x, partner[1] = y.y, partner[2] = y.z, partner[3] = y.w;
    c[0] = cosine.x, c[1] = cosine.y, c[2] = cosine.z, c[3] = cosine.w;
    s[0] = sign * sine.x, s[1] = sign * sine.y, s[2] = sign * sine.z, s[3] = sign * sine.w;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int channel = d + e;
      const bool rotates = channel < rope.rotary_dim, inside = rotates && rotation.row >= 0, high = channel >= half;
      const int pair = high ? channel - half : channel;
      partner[e] = rotates ? to_float(g_row[high ? channel - half : channel + half]) : 0.0f;
      c[e] = inside ? g_cos[pair] : rotates ? nan() : 1.0f;
      s[e] = inside ? g_sin[pair] * (high ? rotation.sign : -rotation.sign) : 0.0f;
    }
  }
  return make_float4(fmaf(partner[0], s[0], x.x * c[0]), fmaf(partner[1], s[1], x.y * c[1]),
                     fmaf(partner[2], s[2], x.z * c[2]), fmaf(partner[3], s[3], x.w * c[3]));
}

// Eight neighbouring pairs from `first` on, read 16 bytes at a time: cosines, and sines with the rotation's sign. NaN
// where the row is outside the table.
struct EightPairs {
  float cosine[8], sine[8];

  __device__ __forceinline__ EightPairs(const QfRope& rope, const Rotation& rotation, int first) {
#pragma unroll
    for (int e = 0; e < 8; ++e) cosine[e] = sine[e] = nan();
    if (rotation.row < 0) return;
    const int64_t at = int64_t(rotation.row) * (rope.rotary_dim / 2) + first;
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      const float4 c = *reinterpret_cast<const float4*>(rope.cos + at + e);
      const float4 s = *reinterpret_cast<const float4*>(rope.sin + at + e);
      cosine[e] = c.x, cosine[e + 1] = c.y, cosine[e + 2] = c.z, cosine[e + 3] = c.w;
      sine[e] = rotation.sign * s.x, sine[e + 1] = rotation.sign * s.y;
      sine[e + 2] = rotation.sign * s.z, sine[e + 3] = rotation.sign * s.w;
    }
  }
};

// Position of query i (row q0 + i) and of key j, for batch b.
__device__ __forceinline__ int position_q(const QfRope& rope, int b, int64_t q0, int i, int len_q, int len_k) {
  if (rope.positions_q) return rope.positions_q[b * rope.stride_positions_q_b + q0 + i];
  return i + (len_k - len_q);
}
__device__ __forceinline__ int position_k(const QfRope& rope, int b, int64_t k0, int j) {
  return rope.positions_k ? rope.positions_k[b * rope.stride_positions_k_b + k0 + j] : j;
}

}  // namespace qf
