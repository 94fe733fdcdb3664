// unfused: attention exactly as its formula, in three kernels. The bottom rung of the ladder.
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
// per 64 channels). FlashAttention avoids that.
//
// Roles: as in `fa`, a lane owns 8 rows x 4 columns of its warp's 16 x 64 piece, assigned as in smem/lanes.cuh.
// Shared memory: scores [64][36] of Q and [64][36] of K, 18 432 bytes; output [64][80] of P and [64][64] of V, 36 864
//   bytes. No pipeline: load, barrier, multiply, barrier; several blocks per SM hide each other's latencies.
// Masks: tiles that no row sees are neither computed nor read; elements a row does not see are never read at all, so
//   the workspace needs no initial value.
// Does not serve rope and packed arrays (qflash/dispatch.py).
// Bound: predicted memory, 24 bytes per score against 4 head_dim FLOP; measured, the products, which nothing overlaps.
// See docs/kernels/unfused.md.
#pragma once

#include "attn/cuda_core/product.cuh"
#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/tile_load.cuh"
#include "kernels/attention/unfused/block.cuh"
#include "kernels/attention/unfused/config.h"
#include "reduce/warp.cuh"

namespace qf {
namespace unfused {

using QWalk = TileWalk<kBlockM, kChunk, kThreads>;
using KWalk = TileWalk<kBlockN, kChunk, kThreads>;
using VWalk = TileWalk<kBlockN, kBlockD, kThreads>;
using LaneMask = TileMask<kLanesY>;

}  // namespace unfused
}  // namespace qf

__global__ void __launch_bounds__(qf::unfused::kThreads)
    qf_unfused_scores_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::unfused;
  extern __shared__ float4 s_memory[];
  float* const s_q = reinterpret_cast<float*>(s_memory);
  float* const s_k = s_q + kBlockM * kQStride;

  const Block block(p, grid, kBlockM);
  const int key0 = block.work.part * kBlockN;
  const KeyRange keys = block.mask.seen_by_any(block.row0, block.last_row);
  if (key0 >= keys.end || key0 + kBlockN <= keys.begin) return;

  const HeadRows<Element> q = block.q_rows(grid.vector.q), k = block.kv_rows(p.kv.k, grid.vector.k);
  float S[kRows][kScoreCols] = {};
  for (int d0 = 0; d0 < p.head_dim; d0 += kChunk) {
    load_scaled<QWalk, kQStride>(s_q, q, block.row0, d0, query_scale(p.scale, p.softcap));
    load_scaled<KWalk, kKStride>(s_k, k, key0, d0, 1.0f);
    __syncthreads();
    qk_product<kLanesX, kScoreCols, kChunk, kQStride, kKStride, 2>(S, s_q + block.y * kQStride,
                                                                   s_k + block.x * kKStride);
    __syncthreads();
  }
  if (p.softcap != 0.0f) apply_softcap(S, p.softcap);
  block.store_scores(S, key0);
}

__global__ void __launch_bounds__(qf::unfused::kThreads)
    qf_unfused_softmax_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::unfused;
  const Block block(p, grid, kSoftmaxRows);
  const int row = block.row0 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.q_len) return;
  const KeyRange keys = block.mask.visible(row);
  float* const g_scores = block.g_scores(row);

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
    const float lse = keys.begin == keys.end ? -infinity() : lse_of(m, l);
    p.lse[block.work.b * p.lse_stride_b + block.work.h * p.lse_stride_h + row] = block.seq.good ? lse : nan();
  }
}

__global__ void __launch_bounds__(qf::unfused::kThreads)
    qf_unfused_output_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::unfused;
  extern __shared__ float4 s_memory[];
  float* const s_p = reinterpret_cast<float*>(s_memory);
  float* const s_v = s_p + kBlockM * kPStride;

  const Block block(p, grid, kBlockM);
  const int d0 = block.work.part * kBlockD;
  const KeyRange keys = block.mask.seen_by_any(block.row0, block.last_row);
  const KeyRange full = block.mask.seen_by_all(block.row0, block.last_row);
  const HeadRows<Element> v = block.kv_rows(p.kv.v, grid.vector.v);

  float O[kRows][4 * kOutVecs];
  set_rows(O, block.seq.good ? 0.0f : nan());
  Raw4<Element>::Type raw[VWalk::kVecs];
  for (int key0 = keys.begin / kBlockN * kBlockN; key0 < keys.end; key0 += kBlockN) {
    fetch<VWalk>(raw, v, key0, d0);
    block.load_weights(s_p, key0);
    stash<VWalk, kVStride>(s_v, raw, v);
    __syncthreads();
    // Accumulated separately and added once, so that O's rounding error grows with the tiles, not with the keys.
    float sum[kRows][4 * kOutVecs] = {};
    const auto pv = [&](auto visible) {
      pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(sum, s_p + block.y * kPStride, s_v + 4 * block.x,
                                                                 visible);
    };
    if (key0 >= full.begin && key0 + kBlockN <= full.end)
      pv(AllVisible{});
    else
      pv(LaneMask(block.mask, block.row0 + block.y, key0));
    add_rows(O, sum);
    __syncthreads();
  }
  block.store_o(O, d0, grid.vector.out);
}
