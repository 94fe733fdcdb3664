// delta = rowsum(dO * O) - dlse, the pass before the other kernels of a backward library: a float for each row of lse,
// at the same place in the workspace. With it dS = P * (dP - delta).
//
// O comes in the type of the problem. dP - delta cancels the more the fewer keys a row sees, and O in 16 bits has too
// few digits for what is left. So rows of few keys compute rowsum(dO * O) as rowsum(P * dP), which it equals.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"

namespace qf {

constexpr int kDeltaThreads = 128;
constexpr int kDeltaRows = 64;     // of a block
constexpr int kDeltaLanes = 8;     // of a row
constexpr int kDeltaFewKeys = 16;  // up to so many, delta is taken from P and dP

// Which tensors may be read in vectors of four. Host side.
struct DeltaAccess {
  bool dout, out;
};

// Where a row's statistics stand: row i of the sequence, in lse, dlse and delta alike.
__device__ __forceinline__ int64_t statistics_at(const QfAttnParams& p, int b, int h, int64_t q0, int i) {
  return b * p.lse_stride_b + h * p.lse_stride_h + q0 + i;
}

// -lse in base 2, where a row that sees nothing, or an infinite sink alone, has -inf: its weights are 0.
__device__ __forceinline__ float minus_lse2(float lse) { return lse == -infinity() ? -infinity() : -lse * kLog2e; }

// Four channels rounded as the products on tensor cores see them.
template <class Element>
__device__ __forceinline__ float4 rounded4(const float4& x, const Element*) {
  const float value[4] = {x.x, x.y, x.z, x.w};
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    Element rounded;
    from_float(value[e], rounded);
    y[e] = to_float(rounded);
  }
  return make_float4(y[0], y[1], y[2], y[3]);
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// rowsum(P * dP) of row i, by a whole warp. keys: those that it sees; kRoundsRope: rotated rows are rounded.
template <class Element, bool kRoundsRope>
__device__ inline float delta_of_few(const QfAttnBwdParams& params, const Sequence& seq, int b, int h, int i,
                                     KeyRange keys, int lane) {
  const QfAttnParams& p = params.fwd;
  const int kv_head = h / (p.q_heads / p.kv_heads);
  const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, false),
      dout(params.dout, b, seq.q0, h, seq.len_q, p.head_dim, false),
      k(p.kv.k, b, seq.k0, kv_head, seq.len_k, p.head_dim, false),
      v(p.kv.v, b, seq.k0, kv_head, seq.len_k, p.head_dim, false);
  const auto channels = [&](const HeadRows<Element>& x, int row, int d) {
    return to_float4(load4(x.row(row), d, p.head_dim, false), x.g_head);
  };
  const auto rotated = [&](const HeadRows<Element>& x, int row, int d, int position) {
    const float4 raw = channels(x, row, d);
    if (!p.rope.cos) return raw;
    const float4 rotated_row = rope4(p.rope, x.row(row), d, p.head_dim, position, raw, false);
    return kRoundsRope ? rounded4(rotated_row, x.g_head) : rotated_row;
  };
  const float minus_lse = minus_lse2(p.lse[statistics_at(p, b, h, seq.q0, i)]);
  const int at_q = p.rope.cos ? position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k) : 0;
  float delta = 0.0f;
  for (int key = keys.begin; key < keys.end; ++key) {
    const int at_k = p.rope.cos ? position_k(p.rope, b, seq.k0, key) : 0;
    float score = 0.0f, gradient = 0.0f;
    for (int d = 4 * lane; d < p.head_dim; d += 128) {
      score = dot4(rotated(q, i, d, at_q), rotated(k, key, d, at_k), score);
      gradient = dot4(channels(dout, i, d), channels(v, key, d), gradient);
    }
    score = sum_of_lanes<32>(score) * p.scale;
    if (p.softcap != 0.0f) score = p.softcap * tanhf(score / p.softcap);
    delta = fmaf(ex2(fmaf(score, kLog2e, minus_lse)), sum_of_lanes<32>(gradient), delta);
  }
  return delta;
}

// The pass: a block takes kDeltaRows rows of one head, a warp four of them at a time. Rows of a sequence whose
// description is out of range are left alone: nobody reads theirs. kRoundsRope: the kernels after it round rotated rows
// to 16 bits, so that P is made of such.
template <class Element, bool kRoundsRope>
__device__ __forceinline__ void write_delta(const QfAttnBwdParams& params, const Grid& grid,
                                            const DeltaAccess& vector) {
  constexpr int kAtOnce = 32 / kDeltaLanes, kWarps = kDeltaThreads / 32;
  const QfAttnParams& p = params.fwd;
  const Work work(p, grid);
  const int b = work.b, h = work.h;
  const Sequence seq = read_sequence(p, b);
  const int first_row = work.row_tile * kDeltaRows;
  if (!seq.good || first_row >= seq.len_q) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
  const HeadRows<Element> dout(params.dout, b, seq.q0, h, seq.len_q, p.head_dim, vector.dout),
      out(p.out, b, seq.q0, h, seq.len_q, p.head_dim, vector.out);
  float* const g_delta = static_cast<float*>(params.workspace);
  for (int first = first_row + warp * kAtOnce; first < min(first_row + kDeltaRows, seq.len_q);
       first += kWarps * kAtOnce) {
    const int row = first + lane / kDeltaLanes;
    float delta = 0.0f;
    if (row < seq.len_q)
      for (int d = 4 * (lane % kDeltaLanes); d < p.head_dim; d += 4 * kDeltaLanes)
        delta = dot4(to_float4(load4(dout.row(row), d, p.head_dim, dout.vector), dout.g_head),
                     to_float4(load4(out.row(row), d, p.head_dim, out.vector), out.g_head), delta);
    delta = sum_of_lanes<kDeltaLanes>(delta);
    if constexpr (sizeof(Element) < sizeof(float)) {
      for (int r = 0; r < kAtOnce && first + r < seq.len_q; ++r) {
        const KeyRange keys = mask.visible(first + r);
        if (keys.begin == keys.end || keys.end - keys.begin > kDeltaFewKeys) continue;
        const float few = delta_of_few<Element, kRoundsRope>(params, seq, b, h, first + r, keys, lane);
        if (lane / kDeltaLanes == r) delta = few;
      }
    }
    if (row < seq.len_q && lane % kDeltaLanes == 0) {
      const int64_t at = statistics_at(p, b, h, seq.q0, row);
      g_delta[at] = delta - (params.dlse ? params.dlse[at] : 0.0f);
    }
  }
}

}  // namespace qf
