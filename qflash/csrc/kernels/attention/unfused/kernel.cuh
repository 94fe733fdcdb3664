// unfused: attention the way it is written down, as three kernels. The bottom rung of the ladder.
//
//   1 qf_unfused_scores_kernel   S = scale Q Kt        one block per kBlockM x kBlockN tile of S
//   2 qf_unfused_softmax_kernel  P = softmax(S), lse   one warp per row, in place
//   3 qf_unfused_output_kernel   O = P V               one block per kBlockM x kBlockD tile of O
//
//        keys                      keys                     channels
//      +-------+                 +-------+                 +-------+
// rows |   S   | --(2) row by -->|   P   | --(3) walks --> |   O   |
//      +-------+       row       +-------+     over keys   +-------+
//
// S and P are float32 in the workspace, one [q_len][k_len] matrix per batch and head: memory grows with Tq x Tk, and
// that matrix crosses the memory bus six times (written; read three times and written in softmax; read once, or once
// per 64 channels). That is what FlashAttention takes away.
//
// Roles: as in `fa`, a lane owns 8 rows x 4 columns of its warp's 16 x 64 piece, dealt out as in smem/lanes.cuh.
// Shared memory: scores [64][36] of Q and [64][36] of K, 18 432 bytes; output [64][80] of P and [64][64] of V, 36 864
//   bytes. No pipeline: load, barrier, multiply, barrier; several blocks per multiprocessor cover for one another.
// Masks: tiles that no row sees are neither computed nor read; elements a row does not see are never read at all, so
//   the workspace needs no initial value.
// Bound: predicted memory, 24 bytes per score against 4 head_dim FLOP; measured, the products, which nothing overlaps.
// See docs/kernels/unfused.md.
#pragma once

#include "attn/cuda_core/product.cuh"
#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "attn/tile_load.cuh"
#include "kernels/attention/unfused/config.h"
#include "reduce/warp.cuh"

namespace qf {
namespace unfused {

using QWalk = TileWalk<kBlockM, kChunk, kThreads>;
using KWalk = TileWalk<kBlockN, kChunk, kThreads>;
using VWalk = TileWalk<kBlockN, kBlockD, kThreads>;
using LaneMask = TileMask<kLanesY>;

// Row i of S or P, of batch b and head h.
__device__ __forceinline__ float* score_row_of(const QfAttnParams& p, int b, int h, int i) {
  return static_cast<float*>(p.workspace) + ((int64_t(b) * p.q_heads + h) * p.q_len + i) * p.k_len;
}

__device__ __forceinline__ KeyRange keys_of_tile(const Mask& mask, int row0) {
  return mask.seen_by_any(row0, min(row0 + kBlockM, mask.len_q) - 1);
}

// s_p <- rows row0 .., keys key0 .. of P, 0 where a row does not see the key.
__device__ __forceinline__ void load_weights(float* s_p, const QfAttnParams& p, int b, int h, const Mask& mask,
                                             int row0, int key0) {
  for (int i = threadIdx.x; i < kBlockM * kBlockN; i += kThreads) {
    const int row = row0 + i / kBlockN, key = key0 + i % kBlockN;
    float weight = 0.0f;
    if (row < mask.len_q) {
      const KeyRange keys = mask.visible(row);
      if (key >= keys.begin && key < keys.end) weight = score_row_of(p, b, h, row)[key];
    }
    s_p[i / kBlockN * kPStride + i % kBlockN] = weight;
  }
}

}  // namespace unfused
}  // namespace qf

__global__ void __launch_bounds__(qf::unfused::kThreads)
    qf_unfused_scores_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::unfused;
  extern __shared__ float4 s_memory[];
  float* const s_q = reinterpret_cast<float*>(s_memory);
  float* const s_k = s_q + kBlockM * kQStride;

  const Work work(p, grid);  // part: key tile
  const int b = work.b, h = work.h, row0 = work.row_tile * kBlockM, key0 = work.part * kBlockN;
  const Sequence seq = read_sequence(p, b);
  if (!seq.good || row0 >= seq.len_q) return;
  const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
  const KeyRange keys = keys_of_tile(mask, row0);
  if (key0 >= keys.end || key0 + kBlockN <= keys.begin) return;

  const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, grid.vector.q);
  const HeadRows<Element> k(p.kv.k, b, seq.k0, h / (p.q_heads / p.kv_heads), seq.len_k, p.head_dim, grid.vector.k);
  const int lane = threadIdx.x % 32, x = Lanes<kLanesX>::x(lane);
  const int lane_row = threadIdx.x / 32 * kWarpRows + Lanes<kLanesX>::y(lane);

  float S[kRows][kScoreCols] = {};
  for (int d0 = 0; d0 < p.head_dim; d0 += kChunk) {
    load_scaled<QWalk, kQStride>(s_q, q, row0, d0, query_scale(p.scale, p.softcap), p.rope, grid.vector.rope,
                                 [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
    load_scaled<KWalk, kKStride>(s_k, k, key0, d0, 1.0f, p.rope, grid.vector.rope,
                                 [&](int j) { return position_k(p.rope, b, seq.k0, j); });
    __syncthreads();
    qk_product<kLanesX, kScoreCols, kChunk, kQStride, kKStride, 2>(S, s_q + lane_row * kQStride, s_k + x * kKStride);
    __syncthreads();
  }
  if (p.softcap != 0.0f) apply_softcap(S, p.softcap);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row0 + lane_row + r * kLanesY;
    if (row >= seq.len_q) continue;
    float* g_scores = score_row_of(p, b, h, row);
#pragma unroll
    for (int j = 0; j < kScoreCols; ++j) {
      const int key = key0 + x + j * kLanesX;
      if (key < seq.len_k) g_scores[key] = S[r][j];
    }
  }
}

__global__ void __launch_bounds__(qf::unfused::kThreads)
    qf_unfused_softmax_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::unfused;
  const Work work(p, grid);
  const int b = work.b, h = work.h;
  const Sequence seq = read_sequence(p, b);
  fill_unserved_rows<Element>(p, seq, b, h, work.row_tile, grid.row_tiles, 0, 0, true);
  const int row = work.row_tile * kSoftmaxRows + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (!seq.good || row >= seq.len_q) return;
  const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
  const KeyRange keys = mask.visible(row);
  float* g_scores = score_row_of(p, b, h, row);

  float m = -infinity();
  for (int j = keys.begin + lane; j < keys.end; j += 32) m = fmaxf(m, g_scores[j]);
  m = max_of_warp(m);
  const float reference = reference_of(m);
  float l = 0.0f;
  for (int j = keys.begin + lane; j < keys.end; j += 32) l += ex2(g_scores[j] - reference);
  l = sum_of_warp(l);
  const float inverse = 1.0f / l;
  for (int j = keys.begin + lane; j < keys.end; j += 32) g_scores[j] = ex2(g_scores[j] - reference) * inverse;
  if (p.lse && lane == 0) {
    const bool empty = keys.begin == keys.end;
    p.lse[b * p.lse_stride_b + h * p.lse_stride_h + seq.q0 + row] = empty ? -infinity() : lse_of(m, l);
  }
}

__global__ void __launch_bounds__(qf::unfused::kThreads)
    qf_unfused_output_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::unfused;
  extern __shared__ float4 s_memory[];
  float* const s_p = reinterpret_cast<float*>(s_memory);
  float* const s_v = s_p + kBlockM * kPStride;

  const Work work(p, grid);  // part: channel tile
  const int b = work.b, h = work.h, row0 = work.row_tile * kBlockM, d0 = work.part * kBlockD;
  const Sequence seq = read_sequence(p, b);
  fill_unserved_rows<Element>(p, seq, b, h, work.row_tile, grid.row_tiles, d0, min(d0 + kBlockD, p.head_dim), false);
  if (!seq.good || row0 >= seq.len_q) return;
  const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
  const KeyRange keys = keys_of_tile(mask, row0);
  const KeyRange full = mask.seen_by_all(row0, min(row0 + kBlockM, seq.len_q) - 1);
  const HeadRows<Element> v(p.kv.v, b, seq.k0, h / (p.q_heads / p.kv_heads), seq.len_k, p.head_dim, grid.vector.v);
  const int lane = threadIdx.x % 32, x = Lanes<kLanesX>::x(lane);
  const int lane_row = threadIdx.x / 32 * kWarpRows + Lanes<kLanesX>::y(lane);

  float O[kRows][4 * kOutVecs] = {};
  Raw4<Element>::Type stage[VWalk::kVecs];
  for (int key0 = keys.begin / kBlockN * kBlockN; key0 < keys.end; key0 += kBlockN) {
    fetch<VWalk>(stage, v, key0, d0);
    load_weights(s_p, p, b, h, mask, row0, key0);
    const bool v_finite = stash<VWalk, kVStride>(s_v, stage, v);
    const bool any_not_finite = __syncthreads_or(!v_finite);
    const bool masked = key0 < full.begin || key0 + kBlockN > full.end;
    // Summed up apart and added once, so that O's rounding error grows with the tiles, not with the keys.
    float sum[kRows][4 * kOutVecs] = {};
    if (masked && any_not_finite)
      pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(sum, s_p + lane_row * kPStride, s_v + 4 * x,
                                                                 LaneMask(mask, row0 + lane_row, key0));
    else
      pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(sum, s_p + lane_row * kPStride, s_v + 4 * x,
                                                                 AllVisible{});
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 4 * kOutVecs; ++c) O[r][c] += sum[r][c];
    __syncthreads();
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row0 + lane_row + r * kLanesY;
    if (row >= seq.len_q) continue;
    const int64_t g_offset = b * p.out.stride_b + (seq.q0 + row) * p.out.stride_t + h * p.out.stride_h;
    store4(static_cast<Element*>(p.out.data) + g_offset, d0 + 4 * x, p.head_dim, grid.vector.out, O[r]);
  }
}
