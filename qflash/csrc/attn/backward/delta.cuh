// delta = rowsum(dO * O) - dlse, computed before the other kernels of a backward library run: one float per row of lse,
// at the same offset in the workspace. With it dS = P * (dP - delta).
//
// O has the type of the problem. The fewer keys a row sees, the more dP - delta cancels, and O in 16 bits has too few
// digits for the difference. So a second pass computes rowsum(dO * O) of rows with few keys as rowsum(P * dP), which is
// equal. P = exp(S - lse) has one common relative error per row, from the rounding of lse: 0.1 % where scores are in
// the thousands, and where one key has all the weight, that error is all that remains of dS. So the sum is divided by
// the sum of the weights, which has the same factor. The pass is a separate kernel because it needs three times the
// registers.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"

namespace qf {

constexpr int kDeltaThreads = 128;
constexpr int kDeltaRows = 64;     // per block
constexpr int kDeltaLanes = 8;     // per row
constexpr int kDeltaFewKeys = 16;  // up to this many keys, delta is computed from P and dP
constexpr int kFewRows = 512;      // per block of the second pass; most rows need no work

// How rows may be read. Host side.
struct DeltaAccess {
  bool dout;    // four channels per load
  bool chunks;  // dout and out, 16 bytes per load
};

// Index of row i's statistics: the same in lse, dlse and delta.
__device__ __forceinline__ int64_t statistics_at(const QfAttnParams& p, int b, int h, int64_t q0, int i) {
  return b * p.lse_stride_b + h * p.lse_stride_h + q0 + i;
}

// -lse in base 2; -inf for a row that sees nothing, or only an infinite sink, so that its weights are 0.
__device__ __forceinline__ float minus_lse2(float lse) { return lse == -infinity() ? -infinity() : -lse * kLog2e; }

// exp(sink - lse), where both may be infinite.
__device__ __forceinline__ float sink_weight(float sink, float lse) {
  return lse == sink ? 1.0f : ex2((sink - lse) * kLog2e);
}

// Four channels rounded as the tensor-core MMAs read them.
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

// rowsum(P * dP) / rowsum(P) of row i, with a sink among its weights, by kDeltaLanes lanes; other lanes of the warp
// have other rows, and none if keys are empty. keys: those that the row sees; kRoundsRope: rotated rows are rounded.
template <class Element, bool kRoundsRope>
__device__ inline float delta_of_few(const QfAttnBwdParams& params, const Sequence& seq, int b, int h, int i,
                                     KeyRange keys, int lane, const Vectorises& vector, bool dout_vector) {
  const QfAttnParams& p = params.fwd;
  const int kv_head = h / (p.q_heads / p.kv_heads);
  const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, vector.q),
      dout(params.dout, b, seq.q0, h, seq.len_q, p.head_dim, dout_vector),
      k(p.kv.k, b, seq.k0, kv_head, seq.len_k, p.head_dim, vector.k),
      v(p.kv.v, b, seq.k0, kv_head, seq.len_k, p.head_dim, vector.v);
  const auto channels = [&](const HeadRows<Element>& x, int row, int d) {
    return to_float4(load4(x.row(row), d, p.head_dim, x.vector), x.g_head);
  };
  const auto rotated = [&](const HeadRows<Element>& x, int row, int d, int position) {
    const float4 raw = channels(x, row, d);
    if (!p.rope.cos) return raw;
    const float4 rotated_row = rope4(p.rope, x.row(row), d, p.head_dim, position, raw, false);
    return kRoundsRope ? rounded4(rotated_row, x.g_head) : rotated_row;
  };
  const int count = keys.end - keys.begin;
  int most = count;  // maximum over the warp's rows: lanes reduce together
#pragma unroll
  for (int step = kDeltaLanes; step < 32; step *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
  const float minus_lse = count > 0 ? minus_lse2(p.lse[statistics_at(p, b, h, seq.q0, i)]) : 0.0f;
  const int at_q = p.rope.cos && count > 0 ? position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k) : 0;
  float delta = 0.0f, weights = 0.0f;
  if (p.sinks && count > 0) weights = sink_weight(p.sinks[h], p.lse[statistics_at(p, b, h, seq.q0, i)]);
#pragma unroll 2
  for (int n = 0; n < most; ++n) {
    const int key = keys.begin + n;
    float score = 0.0f, gradient = 0.0f;
    if (n < count) {
      const int at_k = p.rope.cos ? position_k(p.rope, b, seq.k0, key) : 0;
      for (int d = 4 * (lane % kDeltaLanes); d < p.head_dim; d += 4 * kDeltaLanes) {
        score = dot4(rotated(q, i, d, at_q), rotated(k, key, d, at_k), score);
        gradient = dot4(channels(dout, i, d), channels(v, key, d), gradient);
      }
    }
    score = sum_of_lanes<kDeltaLanes>(score) * p.scale, gradient = sum_of_lanes<kDeltaLanes>(gradient);
    if (p.softcap != 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (n < count) {
      const float weight = ex2(fmaf(score, kLog2e, minus_lse));
      weights += weight;
      delta = fmaf(weight, gradient, delta);
    }
  }
  return delta / weights;
}

// Adds dO * O of this lane's channels to the sums of kRows rows kStep apart, 16 bytes of a row at a time; the loads of
// all rows are in flight at once. kChunks: they may be loaded so. Sums are the same bit for bit either way.
template <int kRows, int kStep, bool kChunks, class Element>
__device__ __forceinline__ void add_products(float (&sums)[kRows], const HeadRows<Element>& dout,
                                             const HeadRows<Element>& out, int first, int lane) {
  constexpr int kPerChunk = 16 / int(sizeof(Element));
  union Chunk {
    uint4 all;
    Element each[kPerChunk];
  };
  const auto load = [&](const HeadRows<Element>& x, int row, int d) {
    Chunk chunk{};
    if constexpr (kChunks) {
      chunk.all = *reinterpret_cast<const uint4*>(x.row(row) + d);
    } else {
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e)
        if (d + e < x.head_dim) chunk.each[e] = x.row(row)[d + e];
    }
    return chunk;
  };
#pragma unroll 1
  for (int d = kPerChunk * (lane % kDeltaLanes); d < dout.head_dim; d += kPerChunk * kDeltaLanes) {
    Chunk x[kRows], y[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(first + r * kStep, dout.length - 1);
      x[r] = load(dout, row, d), y[r] = load(out, row, d);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) sums[r] = fmaf(to_float(x[r].each[e]), to_float(y[r].each[e]), sums[r]);
  }
}

// A block processes some rows of one head. The first rows are launched first: causal masks leave them few keys and so,
// in the second pass, the work. Rows of a sequence whose description is out of range are skipped: no kernel reads their
// delta.
struct DeltaBlock {
  int b, h, first_row;
  Sequence seq;

  __device__ __forceinline__ DeltaBlock(const QfAttnParams& p, const Grid& grid, int rows) {
    const Work work(p, grid);
    b = work.b, h = work.h, first_row = (grid.row_tiles - 1 - work.row_tile) * rows;
    seq = read_sequence(p, b);
  }
  __device__ __forceinline__ bool empty() const { return !seq.good || first_row >= seq.len_q; }
  __device__ __forceinline__ void write(const QfAttnBwdParams& params, int row, float sum) const {
    const int64_t at = statistics_at(params.fwd, b, h, seq.q0, row);
    static_cast<float*>(params.workspace)[at] = sum - (params.dlse ? params.dlse[at] : 0.0f);
  }
};

// The first pass: eight lanes per row, several rows per lane.
template <class Element>
__device__ __forceinline__ void write_delta(const QfAttnBwdParams& params, const Grid& grid,
                                            const DeltaAccess& access) {
  constexpr int kStep = kDeltaThreads / kDeltaLanes, kRows = kDeltaRows / kStep;
  const QfAttnParams& p = params.fwd;
  const DeltaBlock block(p, grid, kDeltaRows);
  if (block.empty()) return;
  const int lane = threadIdx.x % 32, first = block.first_row + int(threadIdx.x) / kDeltaLanes;
  const int len_q = block.seq.len_q;
  const HeadRows<Element> dout(params.dout, block.b, block.seq.q0, block.h, len_q, p.head_dim, access.dout),
      out(p.out, block.b, block.seq.q0, block.h, len_q, p.head_dim, false);
  float sums[kRows] = {};
  if (access.chunks)
    add_products<kRows, kStep, true>(sums, dout, out, first, lane);
  else
    add_products<kRows, kStep, false>(sums, dout, out, first, lane);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = sum_of_lanes<kDeltaLanes>(sums[r]);
    if (first + r * kStep < len_q && lane % kDeltaLanes == 0) block.write(params, first + r * kStep, sum);
  }
}

// Host side: may some row of a 16-bit problem see few keys?
inline bool delta_has_few(const QfAttnParams& p) {
  return p.dtype != QF_F32 &&
         (p.window_left >= 0 || p.window_right >= 0 || p.kv_lens || p.cu_seqlens_q || p.k_len <= kDeltaFewKeys);
}

// The second pass: eight lanes per row of few keys. kRoundsRope: the kernels after it round rotated rows to 16 bits, so
// P is computed from rounded rows here, too.
template <class Element, bool kRoundsRope>
__device__ __forceinline__ void write_delta_of_few(const QfAttnBwdParams& params, const Grid& grid,
                                                   const DeltaAccess& access) {
  const QfAttnParams& p = params.fwd;
  const DeltaBlock block(p, grid, kFewRows);
  if (block.empty()) return;
  const Mask mask = {p.window_left, p.window_right, block.seq.len_q, block.seq.len_k};
  const int end = min(block.first_row + kFewRows, block.seq.len_q), lane = threadIdx.x % 32;
  const auto count = [&](int row) {
    const KeyRange keys = mask.visible(row);
    return keys.end - keys.begin;
  };
  // Over the rows of a sequence the number of visible keys first rises, then falls: if neither end of a run of rows has
  // few, no row between them has.
  if (count(block.first_row) > kDeltaFewKeys && count(end - 1) > kDeltaFewKeys) return;
  constexpr int kAtOnce = 32 / kDeltaLanes;
  for (int first = block.first_row + int(threadIdx.x) / 32 * kAtOnce; first < end;
       first += kDeltaThreads / kDeltaLanes) {
    const int row = first + lane / kDeltaLanes;
    KeyRange keys = row < end ? mask.visible(row) : KeyRange{0, 0};
    if (keys.end - keys.begin > kDeltaFewKeys) keys = {0, 0};
    if (!__any_sync(0xffffffffu, keys.begin < keys.end)) continue;
    const float few = delta_of_few<Element, kRoundsRope>(params, block.seq, block.b, block.h, row, keys, lane,
                                                         grid.vector, access.dout);
    // With an infinity in dO, terms of both signs may give NaN here but not in rowsum(dO * O), which is then kept.
    const bool finite = few - few == 0.0f;
    if (keys.begin < keys.end && finite && lane % kDeltaLanes == 0) block.write(params, row, few);
  }
}

}  // namespace qf
