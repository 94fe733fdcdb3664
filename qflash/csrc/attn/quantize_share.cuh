// What one thread of a quantizing block holds, as quantize_layout.cuh deals it out: loads, smoothing, stores.
#pragma once

#include "attn/quantize_layout.cuh"
#include "attn/quantize_round.cuh"
#include "attn/tokens.cuh"
#include "ptx/dp4a.cuh"
#include "reduce/team.cuh"

namespace qf {

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// largest[i] <- the largest magnitude among it and x[i].
__device__ __forceinline__ void take_largest(uint32_t (&largest)[kHeld], const float (&x)[kHeld][8]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
#pragma unroll
    for (int e = 0; e < 8; ++e) largest[i] = larger(largest[i], magnitude(x[i][e]));
}

// Sum of the first `count` of eight signed bytes; of none when count is not positive.
__device__ __forceinline__ int32_t sum_bytes(uint2 bytes, int count) {
  const auto ones = [](int n) { return n >= 4 ? 0x01010101u : n <= 0 ? 0u : 0x01010101u >> 8 * (4 - n); };
  return dp4a(bytes.x, ones(count), dp4a(bytes.y, ones(count - 4), 0));
}

// One thread's share of a block's work on sequence b.
template <class Element, Unit kUnit, bool kRope>
struct Share {
  static constexpr int kTokens = kUnit == Unit::kWideToken ? 1 : kHeld;  // that a thread holds at once

  const QfQuantizeParams& p;
  const Layout& layout;
  const Tokens s;
  const int b;
  const int lane;    // among the threads of its token
  const int column;  // first of its channels
  uint32_t unit;     // kToken: its first
  int h, group;
  int token0;  // the first of its tokens, counted from the group's

  __device__ __forceinline__ Share(const QfQuantizeParams& params, const Layout& l, const Tokens& tokens, int batch,
                                   uint32_t tile, int thread)
      : p(params), layout(l), s(tokens), b(batch), lane(thread & (l.row_lanes - 1)), column(8 * lane) {
    unit = (tile * (kUnit == Unit::kToken ? kHeld : 1) << l.log_slots) + (thread >> l.log_unit);
    if (kUnit == Unit::kToken) return;
    const uint32_t outer = l.heads(unit);
    h = unit - outer * l.heads.divisor;
    group = l.parts == 1 ? outer : outer / l.parts;
    const int part = outer - group * l.parts;
    token0 = part * (kUnit == Unit::kGroup ? kHeld * l.teams : 1) + ((thread & (l.unit_lanes - 1)) >> l.log_row);
  }

  // What the thread holds in place i.
  struct Place {
    int h, group, token;
    bool inside;  // of the tensor as it was described, were the sequence as long as the longest
  };
  __device__ __forceinline__ Place place(int i) const {
    if (kUnit == Unit::kToken) {
      const uint32_t own = unit + (uint32_t(i) << layout.log_slots);
      const int token = layout.heads(own);
      return {int(own - token * layout.heads.divisor), token, token, own < layout.units};
    }
    const int in_group = token0 + (kUnit == Unit::kGroup ? i * layout.teams : 0);
    const int64_t token = int64_t(group) * layout.group + in_group;
    return {h, group, int(token), unit < layout.units && in_group < layout.group && token < p.length};
  }
  // How often a thread fills its places.
  __device__ __forceinline__ int pieces() const {
    return kUnit == Unit::kWideToken ? (p.head_dim + kHeld * kWide - 1) / (kHeld * kWide) : 1;
  }
  __device__ __forceinline__ bool exists(const Place& at) const { return at.inside && at.token < s.len; }
  __device__ __forceinline__ int channel(int i, int piece) const {
    return kUnit == Unit::kWideToken ? column + (piece * kHeld + i) * kWide : column;
  }
  __device__ __forceinline__ int64_t scale_index(const Place& at) const {
    if (p.granularity == QF_PER_TENSOR) return 0;
    return (int64_t(b) * p.heads + at.h) * layout.groups + at.group;
  }
  __device__ __forceinline__ int64_t token_index(const Place& at) const {
    return (int64_t(b) * p.heads + at.h) * p.length + at.token;
  }

  // x <- what the thread holds: zeros where there is no token, rotated. `piece`: of a wide token.
  __device__ __forceinline__ void load(float (&x)[kHeld][8], int piece) const {
    Raw8<Element> raw[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      raw[i] = Raw8<Element>{};
      if (exists(at))
        raw[i] = load8(token_row<Element>(p, s, b, at.h, at.token), channel(i, piece), p.head_dim, layout.vector);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) to_float8(x[i], raw[i]);
#pragma unroll
    for (int i = 0; i < (kRope ? kHeld : 0); ++i) {
      const Place at = place(i);
      if (exists(at))
        rotate8(x[i], p.rope, token_row<Element>(p, s, b, at.h, at.token), column, p.head_dim,
                position_of(p, s, b, at.token), layout.rope_vector);
    }
  }

  __device__ __forceinline__ void smooth(float (&x)[kHeld][8], int piece) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      const int d = channel(i, piece);
      if (!exists(at) || d >= p.head_dim) continue;
      const float* g_mean = p.mean + (int64_t(b) * p.heads + at.h) * p.head_dim;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (d + e < p.head_dim) x[i][e] = sub_rn(x[i][e], g_mean[d + e]);
    }
  }

  // lift: rotated tokens times a mean that other tokens lost.
  __device__ __forceinline__ void store_lift(const float (&x)[kHeld][8], float* s_scratch) const {
    float dots[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      dots[i] = 0.0f;
      if (!exists(at)) continue;
      const float* g_mean = p.lift_mean + (int64_t(b) * p.lift_heads + at.h / (p.heads / p.lift_heads)) * p.head_dim;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < p.head_dim) dots[i] = fmaf(x[i][e], g_mean[column + e], dots[i]);
    }
    reduce_team(dots, 1, layout.row_lanes, s_scratch, [](float y, float z) { return y + z; });
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      if (at.inside && lane == 0) p.lift[token_index(at)] = dots[i];
    }
  }

  // What each place's token tells its group, from the largest magnitudes this thread has seen of it.
  __device__ __forceinline__ void keys_of(uint32_t (&keys)[kHeld], uint32_t (&largest)[kHeld],
                                          uint32_t* s_scratch) const {
#pragma unroll
    for (int i = kTokens; i < kHeld; ++i) largest[0] = larger(largest[0], largest[i]);
#pragma unroll
    for (int i = kTokens; i < kHeld; ++i) largest[i] = largest[0];
    reduce_team(largest, 1, layout.row_lanes, s_scratch, larger);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const Place at = place(i);
      const bool wild = at.inside && !s.good;
      keys[i] = wild ? kNotFinite : exists(at) ? token_key(largest[i]) : kNoToken;
    }
  }

  __device__ __forceinline__ void store_sums(int32_t (&sums)[kHeld], int32_t* s_scratch) const {
    reduce_team(sums, 1, layout.row_lanes, s_scratch, [](int32_t y, int32_t z) { return y + z; });
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const Place at = place(i);
      if (at.inside && lane == 0) p.sums[token_index(at)] = sums[i];
    }
  }

  __device__ __forceinline__ void store_values(const Place& at, int d, uint2 bytes) const {
    if (!at.inside || at.token >= s.owned) return;
    int8_t* g_row = static_cast<int8_t*>(p.values.data) + b * p.values.stride_b +
                    (s.first + at.token) * p.values.stride_t + at.h * p.values.stride_h;
    if (layout.vector) {
      if (d < p.head_dim) *reinterpret_cast<uint2*>(g_row + d) = bytes;
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (d + e < p.head_dim) g_row[d + e] = int8_t((e < 4 ? bytes.x : bytes.y) >> 8 * (e % 4));
  }

  // Index of the token's first element in the tensor as it is written down, whatever its strides.
  __device__ __forceinline__ uint64_t element_of(const Place& at) const {
    const int64_t row = p.cu_seqlens ? s.first + at.token : int64_t(b) * p.length + at.token;
    return uint64_t(row * p.heads + at.h) * p.head_dim;
  }
};

}  // namespace qf
