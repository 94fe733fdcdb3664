// What one thread of a quantizing block holds, as distributed by quant/layout.cuh: loads, smoothing, stores.
#pragma once

#include "ptx/dp4a.cuh"
#include "quant/layout.cuh"
#include "quant/round.cuh"
#include "quant/tokens.cuh"
#include "reduce/team.cuh"

namespace qf {

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// largest[i] <- the largest magnitude among it and x[i].
template <int kHeld>
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

// One thread's share of a block's work on sequence b: eight channels in each of kHeld places. Place i is token token0 +
// i * teams of head h or, for a wide token, piece i.
template <class Element, Unit kUnit, Moves kMoves>
struct Share {
  static constexpr int kHeld = kPlaces<kUnit, kMoves>;
  static constexpr bool kPieces = kUnit == Unit::kWideToken;
  static constexpr bool kVectors = kMoves != Moves::kSingly;
  static constexpr int kTokens = kPieces ? 1 : kHeld;  // that a thread holds at once

  const QfQuantizeParams& p;
  const Layout& layout;
  const Tokens s;
  const int b;
  const int lane;    // among the threads of its token
  const int column;  // the first of its channels
  int h, group, token0;
  bool first_part;  // of the group
  // Numbers of places, counted from 0, whose tokens are inside the tensor as it is described, as if the sequence were
  // as long as the longest; whose tokens have a place in `values`; whose tokens exist.
  int inside, owned, existing;

  __device__ __forceinline__ Share(const QfQuantizeParams& params, const Layout& l, const Tokens& tokens, int batch,
                                   uint32_t tile, int thread)
      : p(params), layout(l), s(tokens), b(batch), lane(thread & (l.row_lanes - 1)), column(8 * lane) {
    const uint32_t unit = (tile << l.log_slots) + (thread >> l.log_unit), outer = l.heads(unit);
    h = unit - outer * l.heads.divisor;
    group = l.parts(outer);
    const int part = outer - group * l.parts.divisor;
    // Unsigned: all are below 2^31 except for what a last unit adds.
    const uint32_t begin = uint32_t(group) * l.group;
    const uint32_t first =
        begin + part * (kPieces ? 1 : kHeld << l.log_teams) + ((thread & (l.unit_lanes - 1)) >> l.log_row);
    token0 = int(first);
    first_part = part == 0;
    const auto places = [&](int length) {
      const uint32_t limit = min(uint32_t(length), begin + l.group);
      if (first >= limit) return 0;
      return kPieces ? 1 : int(min(((limit - first - 1) >> l.log_teams) + 1, uint32_t(kHeld)));
    };
    inside = unit < l.units ? places(p.length) : 0;
    owned = min(inside, places(s.owned));
    existing = min(inside, places(s.len));
  }

  __device__ __forceinline__ int token(int i) const { return token0 + (kPieces ? 0 : i << layout.log_teams); }
  // Whether place i is among the first `count`; of a wide token, all pieces are or none.
  __device__ __forceinline__ bool among(int i, int count) const { return kPieces ? count > 0 : i < count; }
  // The number of times a thread fills its places.
  __device__ __forceinline__ int pieces() const {
    return kPieces ? (p.head_dim + kHeld * kWide - 1) / (kHeld * kWide) : 1;
  }
  __device__ __forceinline__ int channel(int i, int piece) const {
    return kPieces ? column + (piece * kHeld + i) * kWide : column;
  }
  __device__ __forceinline__ int64_t head() const { return int64_t(b) * p.heads + h; }
  __device__ __forceinline__ int64_t scale_index(int i) const {
    if (p.granularity == QF_PER_TENSOR) return 0;
    return head() * layout.scales + (kUnit == Unit::kToken ? token(i) : group);
  }

  // x <- what the thread holds: zeros if there is no token, rotated. `piece`: of a wide token.
  __device__ __forceinline__ void load(float (&x)[kHeld][8], int piece) const {
    const Element* const g_row = token_row<Element>(p, s, b, h, token0);
    const int64_t step = kPieces ? 0 : p.x.stride_t << layout.log_teams;
    Raw8<Element> raw[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) raw[i] = Raw8<Element>{};
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (among(i, existing)) raw[i] = load8(g_row + i * step, channel(i, piece), p.head_dim, kVectors);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) to_float8(x[i], raw[i]);
    if constexpr (!kPieces && kMoves != Moves::kVectors) {
      if (!p.rope.cos) return;
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (among(i, existing))
          rotate8(x[i], p.rope, g_row + i * step, column, p.head_dim, position_of(p, s, b, token(i)), kVectors);
    }
  }

  // Eight floats of a head, zeros past its end.
  __device__ __forceinline__ void load_mean(float (&mean)[8], const float* g_head, int d) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) mean[e] = d + e < p.head_dim ? g_head[d + e] : 0.0f;
  }

  // Places without a token stay 0.
  __device__ __forceinline__ void smooth(float (&x)[kHeld][8], int piece) const {
    if (existing == 0) return;
    float mean[8];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (kPieces || i == 0) load_mean(mean, p.mean + head() * p.head_dim, channel(i, piece));
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i][e] = among(i, existing) ? sub_rn(x[i][e], mean[e]) : 0.0f;
    }
  }

  // q . k_mean: what smoothing the keys subtracted from every score of a query.
  __device__ __forceinline__ void store_q_dot_mean(const float (&x)[kHeld][8], float* s_scratch) const {
    float mean[8], dots[kHeld] = {};
    const int kv_head = h / (p.heads / p.kv_heads);
    load_mean(mean, p.k_mean + (int64_t(b) * p.kv_heads + kv_head) * p.head_dim, column);
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int e = 0; e < 8; ++e) dots[i] = fmaf(x[i][e], mean[e], dots[i]);
    reduce_team(dots, 1, layout.row_lanes, s_scratch, [](float y, float z) { return y + z; });
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (i < inside && lane == 0) p.q_dot_mean[head() * p.length + token(i)] = dots[i];
  }

  // What each place's token contributes to its group, from the largest magnitudes this thread has seen of it.
  __device__ __forceinline__ void keys_of(uint32_t (&keys)[kHeld], uint32_t (&largest)[kHeld],
                                          uint32_t* s_scratch) const {
#pragma unroll
    for (int i = kTokens; i < kHeld; ++i) largest[0] = larger(largest[0], largest[i]);
#pragma unroll
    for (int i = kTokens; i < kHeld; ++i) largest[i] = largest[0];
    reduce_team(largest, 1, layout.row_lanes, s_scratch, larger);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      keys[i] = among(i, existing) ? token_key(largest[i]) : kNoToken;
      if (!s.good && among(i, inside)) keys[i] = kNotFinite;
    }
  }

  __device__ __forceinline__ void store_sums(int32_t (&sums)[kHeld], int32_t* s_scratch) const {
    reduce_team(sums, 1, layout.row_lanes, s_scratch, [](int32_t y, int32_t z) { return y + z; });
#pragma unroll
    for (int i = 0; i < kTokens; ++i)
      if (i < inside && lane == 0) p.sums[head() * p.length + token(i)] = sums[i];
  }

  // The address of place 0's values, and the distance to the next place's.
  __device__ __forceinline__ int8_t* values_row() const {
    return static_cast<int8_t*>(p.values.data) + b * p.values.stride_b + (s.first + token0) * p.values.stride_t +
           h * p.values.stride_h;
  }
  __device__ __forceinline__ int64_t values_step() const { return kPieces ? 0 : p.values.stride_t << layout.log_teams; }
  __device__ __forceinline__ void store_values(int8_t* g_row, int i, int d, uint2 bytes) const {
    if (!among(i, owned)) return;
    if constexpr (kVectors) {
      if (d < p.head_dim) *reinterpret_cast<uint2*>(g_row + d) = bytes;
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (d + e < p.head_dim) g_row[d + e] = int8_t((e < 4 ? bytes.x : bytes.y) >> 8 * (e % 4));
    }
  }

  // Index of a token's first element in the tensor's logical order, whatever its strides.
  __device__ __forceinline__ uint64_t element_of(int i) const {
    const int64_t row = p.cu_seqlens ? s.first + token(i) : int64_t(b) * p.length + token(i);
    return uint64_t(row * p.heads + h) * p.head_dim;
  }
};

}  // namespace qf
