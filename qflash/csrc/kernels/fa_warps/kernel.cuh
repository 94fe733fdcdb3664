// fa_warps: FlashAttention on CUDA cores with warps that rarely meet. Products, softmax and sums in float32 for
// float32, float16 and bfloat16 arrays.
//
// One block computes kBlockM rows of one head, walking over the keys in tiles of kBlockN; a warp has its rows to
// itself:
//
//                K tile, whole (shared, arrays' type)        V tile, whole (shared, arrays' type)
//                       | read by every warp                        | read by every warp
//     warp 0 rows   S = Q Kt -> softmax by shuffles -> P (its own) -> O += P V     no barrier from left to right
//     warp 1 rows   S = Q Kt -> softmax by shuffles -> P (its own) -> O += P V     but the two hand-overs below
//     ...
//
// Roles: every warp does everything for its rows. Lane (y, x) owns 8 rows and kBlockN/kLanesX scores, kHeadDim/kLanesX
//   outputs of each (smem/lanes.cuh). Registers of a lane at head_dim 128: 64 outputs, 32 scores, 36 of operands, 16 of
//   maxima and sums; nothing is staged in registers on its way to shared memory.
//
// Shared memory (head_dim 128, float32, Hopper: 128 rows, 64 keys, 8 warps, one block a multiprocessor), in floats:
//   s_q      [kBlockM][kHeadDim + 4]        scaled, rotated q       128 x 132 = 16896
//   s_p      [kBlockM][kBlockN + kLanesX]   weights                 128 x  80 = 10240   a warp reads only what it wrote
//   s_fold   [kBlockM]                      maxima at the last fold             128
//   s_k      [kBlockN][kHeadDim] + 16 bytes a row                    64 x 132 =  8448   in the arrays' type
//   s_v      [kBlockN][kHeadDim]                                     64 x 128 =  8192   in the arrays' type
// Together 175 616 bytes. The bank argument is that of smem/lanes.cuh; 16-bit K rows, read 8 bytes at a time, start
//   (kHeadDim + 8) / 2 words apart, 4 or 20 mod 32: eight of them hit eight different pairs of banks.
//
// Pipeline: K and V have a buffer each, and one fills while the other is read. V of a tile is copied (cp.async) behind
//   Q Kt and the softmax, K of the next behind P V. Two barriers a tile, whatever head_dim is: at each a tile passes
//   from the copying threads to the reading warps, and the other buffer back. Rotated K goes through registers, after
//   the barrier and before P V, and so does everything on Turing, which has no cp.async.
//
// Masks, NaN in masked rows of V, folding of float32 sums: as in `fa`.
//
// Bound: the FMA units, as in `fa`. See docs/kernels/fa_warps.md.
#pragma once

#include "attn/fold.cuh"
#include "attn/mask.cuh"
#include "attn/products.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "attn/tile_load.cuh"
#include "kernels/fa_warps/config.h"
#include "reduce/lanes.cuh"

namespace qf {
namespace fa_warps {

using QWalk = TileWalk<kBlockM, kHeadDim, kThreads>;
using KvWalk = TileWalk<kBlockN, kHeadDim, kThreads>;
using LaneMask = TileMask<kLanesY>;

// Where a thread stands in the tile: its column x, its first row (the others are kLanesY apart).
struct Place {
  int x, row0;
  __device__ __forceinline__ Place(int thread, int block_row)
      : x(Lanes<kLanesX>::x(thread % 32)), row0(block_row + thread / 32 * kWarpRows + Lanes<kLanesX>::y(thread % 32)) {}
};

// Close the open copies of this thread, and wait for them: nothing to do where there are none.
__device__ __forceinline__ void commit_copies() {
  if constexpr (kAsync) cp_async_commit();
}
__device__ __forceinline__ void wait_for_copies() {
  if constexpr (kAsync) cp_async_wait<0>();
}

}  // namespace fa_warps
}  // namespace qf

__global__ void __launch_bounds__(qf::fa_warps::kThreads, qf::fa_warps::kMinBlocks)
    qf_fa_warps_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::fa_warps;
  extern __shared__ float4 s_memory[];
  float* const s_q = reinterpret_cast<float*>(s_memory);
  float* const s_p = s_q + kQFloats;
  float* const s_fold = s_p + kPFloats;  // maxima of the rows when they were last folded
  Element* const s_k = reinterpret_cast<Element*>(s_fold + kBlockM);
  Element* const s_v = s_k + kKElements;

  const Work work(p, grid);
  const int b = work.b, h = work.h;
  const Sequence seq = read_sequence(p, b);
  fill_unserved_rows<Element>(p, seq, b, h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
  const int block_row = work.row_tile * kBlockM;
  if (!seq.good || block_row >= seq.len_q) return;

  const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
  const int kv_head = h / (p.q_heads / p.kv_heads);
  const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, grid.vector.q);
  const HeadRows<Element> k(p.k, b, seq.k0, kv_head, seq.len_k, p.head_dim, grid.vector.k);
  const HeadRows<Element> v(p.v, b, seq.k0, kv_head, seq.len_k, p.head_dim, grid.vector.v);

  const int warp_row = block_row + threadIdx.x / 32 * kWarpRows;
  const Place place(threadIdx.x, block_row);
  const int x = place.x, row0 = place.row0;
  const auto last_row = [&](int first, int rows) { return min(first + rows, seq.len_q) - 1; };
  const KeyRange block_keys = mask.seen_by_any(block_row, last_row(block_row, kBlockM));
  KeyRange warp_keys = {0, 0}, warp_full = {0, 0};  // seen by some row of the warp, by every row
  if (warp_row < seq.len_q) {
    warp_keys = mask.seen_by_any(warp_row, last_row(warp_row, kWarpRows));
    warp_full = mask.seen_by_all(warp_row, last_row(warp_row, kWarpRows));
  }

  float O[kRows][4 * kOutVecs] = {};
  float m[kRows], l[kRows];  // of the rows; l: this lane's share
#pragma unroll
  for (int r = 0; r < kRows; ++r) m[r] = -infinity(), l[r] = 0.0f;

  const auto load_k = [&](int key0) {
    if (p.rope.cos)
      load_scaled<KvWalk, kKStride>(s_k, k, key0, 0, 1.0f, p.rope, grid.vector.rope,
                                    [&](int j) { return position_k(p.rope, b, seq.k0, j); });
    else
      copy_tile<KvWalk, kKStride, kAsync>(s_k, k, key0);
    commit_copies();
  };
  const auto load_v = [&](int key0) {
    copy_tile<KvWalk, kVStride, kAsync>(s_v, v, key0);
    commit_copies();
  };

  int key0 = block_keys.begin / kBlockN * kBlockN;
  if (block_keys.begin < block_keys.end) {
    load_k(key0);
    load_scaled<QWalk, kQStride>(s_q, q, block_row, 0, query_scale(p.scale, p.softcap), p.rope, grid.vector.rope,
                                 [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
  }

  float* const s_q_rows = s_q + (row0 - block_row) * kQStride;
  float* const s_p_rows = s_p + (row0 - block_row) * kPStride;
  bool folded = false;
  for (bool last = false; !last;) {
    const int fold_end = kFolds ? min(block_keys.end, key0 + kFoldKeys) : block_keys.end;
#pragma unroll 1
    for (; key0 < fold_end; key0 += kBlockN) {
      const bool works = key0 < warp_keys.end && key0 + kBlockN > warp_keys.begin;
      const bool masked = key0 < warp_full.begin || key0 + kBlockN > warp_full.end;

      wait_for_copies();
      __syncthreads();  // K has changed hands: loaders to readers. And V back: nobody reads the last tile any more
      load_v(key0);
      if (works) {
        float S[kRows][kScoreCols] = {};
        float rescale[kRows];
        qk_product<kLanesX, kScoreCols, kHeadDim, kQStride, kKStride, kQkUnroll>(S, s_q_rows, s_k + x * kKStride);
        if (p.softcap != 0.0f) apply_softcap(S, p.softcap);
        if (masked) mask_scores<kLanesX>(S, LaneMask(mask, row0, key0 + x));
        online_softmax<kLanesX, 1, 1>(S, m, l, true, rescale);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int c = 0; c < 4 * kOutVecs; ++c) O[r][c] *= rescale[r];
        store_weights<kLanesX, kPStride>(s_p_rows + x, S);
        __syncwarp();  // the weights are read by other lanes of this warp
      }

      wait_for_copies();
      // V has changed hands, and K back.
      const bool v_finite = !__syncthreads_or(!own_copies_finite<KvWalk, kVStride>(s_v));
      if (key0 + kBlockN < block_keys.end) load_k(key0 + kBlockN);
      if (works) {
        if (masked && !v_finite)
          pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(O, s_p_rows, s_v + 4 * x,
                                                                     LaneMask(mask, row0, key0));
        else
          pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(O, s_p_rows, s_v + 4 * x, AllVisible{});
      }
    }

    last = key0 >= block_keys.end;
    const Place here(fresh_tid(), block_row);
    fold_rows<kLanesX, kOutVecs, 1, 1, kFolds>(O, m, s_fold + (here.row0 - block_row), l,
                                               OutRows<Element>(p, b, seq.q0, h, grid.vector.out), mask, here.x,
                                               here.row0, folded, last);
    folded = true;
  }
}
