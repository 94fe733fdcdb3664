// Queries for what quantize_kv left: rotated, then mixed and rounded as keys were, to the integers of
// docs/kernels/sm90_quantize.md. Unlike INT8 pages' they are not rounded to 16 bits between the two.
#pragma once

#include "attn/decode/int8_queries.cuh"
#include "attn/decode/share.cuh"
#include "ptx/mov.cuh"
#include "quant/tokens.cuh"

namespace qf {
namespace decode {

// A row of q as quantize_queries() reads it, sixteen channels at a time: zeros past the last.
template <class Element>
struct KeptRow {
  const QfAttnParams& p;
  const Element* g_row;
  int position, d;

  __device__ __forceinline__ KeptRow operator+(int column) const { return {p, g_row, position, column}; }
};

// Channels d .. d + 15 of a row, rotated: each product is rounded, and then their sum, as in quant/tokens.cuh. The warp
// that quantizes queries has few registers: four channels at a time are read, one by one and behind a branch, and where
// they lie is worked out anew for every row. All but the first four come from L1.
template <class Element>
__device__ __forceinline__ void rotate16(float (&x)[16], const KeptRow<Element>& row) {
  const QfRope& rope = row.p.rope;
  const Rotation rotation = rotation_at(rope, row.position);
  const int half = rope.rotary_dim / 2;
  const int64_t table_row = int64_t(max(rotation.row, 0)) * half;
  const float sign = rotation.row < 0 ? nan() : rotation.sign;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const int first = int(fresh(uint32_t(row.d + i)));
    if (first >= rope.rotary_dim) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int channel = first + e;
      const bool upper = rope.interleaved ? e % 2 == 1 : channel >= half;
      const int pair = rope.interleaved ? channel / 2 : upper ? channel - half : channel;
      const int partner = rope.interleaved ? channel ^ 1 : upper ? pair : channel + half;
      if (channel < rope.rotary_dim) {
        const float sine = mul_rn(upper ? sign : -sign, rope.sin[table_row + pair]);
        x[i + e] = add_rn(mul_rn(x[i + e], rope.cos[table_row + pair]), mul_rn(to_float(row.g_row[partner]), sine));
      }
    }
  }
}

template <class Element>
__device__ __forceinline__ void load16(float (&x)[16], const KeptRow<Element>& row, bool aligned) {
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    float eight[8];
    to_float8(eight, load8(row.g_row, row.d + i, row.p.head_dim, aligned));
#pragma unroll
    for (int e = 0; e < 8; ++e) x[i + e] = eight[e];
  }
  if (row.p.rope.cos) rotate16(x, row);
}

// By whole warps: threads `thread` of `threads`. aligned: rows are read 16 bytes at a time.
template <class Config>
__device__ __forceinline__ void quantize_kept_queries(const QfAttnParams& p, const Part& part, bool aligned,
                                                      char* s_queries, int thread, int threads) {
  using Element = typename Config::Element;
  const int group = p.q_heads / p.kv_heads, keys = p.kv_lens ? p.kv_lens[part.b] : p.k_len;
  const auto row_at = [&](int row) {
    const int token = row / group, head = part.kv_head * group + row - token * group;
    const Element* const g_row =
        static_cast<const Element*>(p.q.data) + part.b * p.q.stride_b + token * p.q.stride_t + head * p.q.stride_h;
    const int position = p.rope.cos ? position_q(p.rope, part.b, 0, token, p.q_len, keys) : 0;
    return KeptRow<Element>{p, g_row, position, 0};
  };
  const float* const g_mean =
      wants_dot_k_mean(p) ? p.kv.k_mean + (int64_t(part.b) * p.kv_heads + part.kv_head) * p.head_dim : nullptr;
  quantize_queries<Config>(p.q_len * group, p.head_dim, row_at, aligned, g_mean, s_queries, thread, threads);
}

}  // namespace decode
}  // namespace qf
