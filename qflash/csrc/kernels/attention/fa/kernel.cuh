// fa: FlashAttention on CUDA cores. All arithmetic in float32, for float32, float16 and bfloat16 arrays.
//
// One block computes kBlockM rows of one head in a main loop over tiles of kBlockN keys:
//
//                 kBlockN keys                          roles: every warp does everything, for its own rows.
//              +---------------+                        Lane (y, x) of a warp owns 8 rows (y, y + kLanesY, ..)
//     kBlockM  | S = Q Kt  warp 0 rows |  -> P (shared)   and kBlockN/kLanesX key columns of S,
//     rows     |           warp 1 rows |                  kHeadDim/kLanesX channels of O (registers).
//              |           ...         |
//              +---------------+                        head_dim 128 on Hopper: 64 x 64 tile, 4 warps of 2 x 16 lanes,
//     O (registers) += P V                              8 x 4 scores and 8 x 8 outputs per lane, 2 blocks per SM.
//
// Shared memory (head_dim 128, Hopper), in floats:
//   s_q          [kBlockM][kHeadDim + 4]       scaled, rotated q     64 x 132 = 8448
//   s_p          [kBlockM][kBlockN + kLanesX]  weights               64 x  80 = 5120   a warp reads only what it wrote
//   s_kv         2 x kBufferFloats             K or V chunks     2 x 64 x  36 = 4608   K [kBlockN][kChunk + 4],
//                                                                                      V [kVRows][kHeadDim]
//   s_m, s_fold  [kBlockM] each                maxima of rows         2 x 64 =  128
//   s_l          [8][kThreads]                 sums of lanes          8 x 128 = 1024
// Together 77 312 bytes. Padding and lane order: smem/lanes.cuh.
//
// Pipeline: a tile is kKSteps steps on channels of K, softmax, then kVSteps steps on keys of V. A step loads the next
//   chunk into registers, computes on the current buffer, stores the loaded chunk to the other buffer, and ends with a
//   block barrier. One barrier is enough: the other buffer was last read before the previous one. Rotated K skips the
//   registers: it is loaded, rotated and stored in one go after the product.
//
// Masks: tiles no row of the block sees are not visited, tiles no row of a warp sees are skipped by that warp, and only
//   tiles some row sees in part are masked element by element. A masked V row may hold NaN or infinity: the barrier
//   also returns whether the chunk is finite, and if not such tiles leave masked keys out of the sum instead of
//   multiplying them by 0.
//
// Accumulators: float32 arrays fold O into `out` every kFoldKeys keys (see attn/cuda_core/fold.cuh); a thread reads
//   back only what it wrote itself.
//
// Bound: the FMA units. 4 Tq Tk head_dim FLOP per head at 128 FMA per cycle and SM. Per lane and tile (head_dim 128)
//   8192 FMA against 640 16-byte shared loads (2 cycles of the shared-memory pipe each, 1280 of the 2048 cycles a
//   warp's FMA take), 32 ex2 and 32 shuffles. See docs/kernels/fa.md.
#pragma once

#include "attn/cuda_core/fold.cuh"
#include "attn/cuda_core/product.cuh"
#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "attn/tile_load.cuh"
#include "kernels/attention/fa/config.h"
#include "reduce/lanes.cuh"

namespace qf {
namespace fa {

using Raw = Raw4<Element>::Type;
using QWalk = TileWalk<kBlockM, kHeadDim, kThreads>;
using KWalk = TileWalk<kBlockN, kChunk, kThreads>;
using VWalk = TileWalk<kVRows, kHeadDim, kThreads>;
constexpr int kHeld = KWalk::kVecs > VWalk::kVecs ? KWalk::kVecs : VWalk::kVecs;

// A thread's position in the tile: its column x, its first row (the others are kLanesY apart).
struct Place {
  int x, row0;
  __device__ __forceinline__ Place(int thread, int block_row)
      : x(Lanes<kLanesX>::x(thread % 32)), row0(block_row + thread / 32 * kWarpRows + Lanes<kLanesX>::y(thread % 32)) {}
};

using LaneMask = TileMask<kLanesY>;

}  // namespace fa
}  // namespace qf

__global__ void __launch_bounds__(qf::fa::kThreads, qf::fa::kMinBlocks)
    qf_fa_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::fa;
  extern __shared__ float4 s_memory[];
  float* const s_q = reinterpret_cast<float*>(s_memory);
  float* const s_p = s_q + kQFloats;
  float* const s_kv = s_p + kPFloats;

  const Work work(p, grid);
  const int b = work.b, h = work.h;
  const Sequence seq = read_sequence(p, b);
  fill_unserved_rows<Element>(p, seq, b, h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
  const int block_row = work.row_tile * kBlockM;
  if (!seq.good || block_row >= seq.len_q) return;

  const Mask mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
  const int kv_head = h / (p.q_heads / p.kv_heads);
  const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, grid.vector.q);
  const HeadRows<Element> k(p.kv.k, b, seq.k0, kv_head, seq.len_k, p.head_dim, grid.vector.k);
  const HeadRows<Element> v(p.kv.v, b, seq.k0, kv_head, seq.len_k, p.head_dim, grid.vector.v);

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
  // Running statistics of this lane's rows: row r at s_m[r * kLanesY], s_fold[r * kLanesY], s_l[r * kThreads].
  float* const s_m = s_kv + 2 * kBufferFloats + (row0 - block_row);
  float* const s_fold = s_m + kMaxFloats;  // s_m as it was when O was last folded into out
  float* const s_l = s_kv + 2 * kBufferFloats + 2 * kMaxFloats + threadIdx.x;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (x == 0) s_m[r * kLanesY] = -infinity();
    s_l[r * kThreads] = 0.0f;
  }

  Raw held[kHeld];
  const bool rotates = p.rope.cos != nullptr;
  const auto fetch_k = [&](int first_key, int d0) {
    if (!rotates) fetch<KWalk>(held, k, first_key, d0);
  };
  const auto stash_k = [&](float* s_tile, int first_key, int d0) {
    if (rotates)
      load_scaled<KWalk, kKStride>(s_tile, k, first_key, d0, 1.0f, p.rope, grid.vector.rope,
                                   [&](int j) { return position_k(p.rope, b, seq.k0, j); });
    else
      stash<KWalk, kKStride>(s_tile, held, k);
  };

  int key0 = block_keys.begin / kBlockN * kBlockN;
  if (block_keys.begin < block_keys.end) {
    fetch_k(key0, 0);
    load_scaled<QWalk, kQStride>(s_q, q, block_row, 0, query_scale(p.scale, p.softcap), p.rope, grid.vector.rope,
                                 [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
    stash_k(s_kv, key0, 0);
  }
  __syncthreads();

  float* s_now = s_kv;                   // being computed on
  float* s_next = s_kv + kBufferFloats;  // being filled
  bool folded = false;
  for (bool last = false; !last;) {
    const int fold_end = kFolds ? min(block_keys.end, key0 + kFoldKeys) : block_keys.end;
    for (; key0 < fold_end; key0 += kBlockN) {
      const bool works = key0 < warp_keys.end && key0 + kBlockN > warp_keys.begin;
      const bool masked = key0 < warp_full.begin || key0 + kBlockN > warp_full.end;
      bool v_finite = true;

      float S[kRows][kScoreCols] = {};
#pragma unroll 1
      for (int step = 0; step < kKSteps; ++step) {
        const bool k_next = step + 1 < kKSteps;
        if (k_next)
          fetch_k(key0, (step + 1) * kChunk);
        else
          fetch<VWalk>(held, v, key0, 0);
        if (works)
          qk_product<kLanesX, kScoreCols, kChunk, kQStride, kKStride, kQkUnroll>(
              S, s_q + (row0 - block_row) * kQStride + step * kChunk, s_now + x * kKStride);
        if (k_next)
          stash_k(s_next, key0, (step + 1) * kChunk);
        else
          v_finite = stash<VWalk, kVStride>(s_next, held, v);
        v_finite = !__syncthreads_or(!v_finite);
        float* const s_swap = s_now;
        s_now = s_next, s_next = s_swap;
      }

      if (works) {
        float rescale[kRows];
        if (p.softcap != 0.0f) apply_softcap(S, p.softcap);
        if (masked) mask_scores<kLanesX>(S, LaneMask(mask, row0, key0 + x));
        online_softmax<kLanesX, kLanesY, kThreads>(S, s_m, s_l, x == 0, rescale);
        scale_rows(O, rescale);
        store_weights<kLanesX, kPStride>(s_p + (row0 - block_row) * kPStride + x, S);
        __syncwarp();  // the weights are read by other lanes of this warp
      }

#pragma unroll 1
      for (int step = 0; step < kVSteps; ++step) {
        const bool v_next = step + 1 < kVSteps;
        if (v_next)
          fetch<VWalk>(held, v, key0 + (step + 1) * kVRows, 0);
        else if (key0 + kBlockN < block_keys.end)
          fetch_k(key0 + kBlockN, 0);
        if (works) {
          const float* s_weights = s_p + (row0 - block_row) * kPStride + step * kVRows;
          if (masked && !v_finite)
            pv_product<kLanesX, kOutVecs, kVRows, kPStride, kVStride>(O, s_weights, s_now + 4 * x,
                                                                      LaneMask(mask, row0, key0 + step * kVRows));
          else
            pv_product<kLanesX, kOutVecs, kVRows, kPStride, kVStride>(O, s_weights, s_now + 4 * x, AllVisible{});
        }
        bool next_finite = true;
        if (v_next)
          next_finite = stash<VWalk, kVStride>(s_next, held, v);
        else if (key0 + kBlockN < block_keys.end)
          stash_k(s_next, key0 + kBlockN, 0);
        v_finite = !__syncthreads_or(!next_finite);
        float* const s_swap = s_now;
        s_now = s_next, s_next = s_swap;
      }
    }

    // Fold O into what earlier keys left in out; after the last key, divide by the sum of the weights.
    last = key0 >= block_keys.end;
    const Place here(fresh_tid(), block_row);
    fold_rows<kLanesX, kOutVecs, kLanesY, kThreads, kFolds>(
        O, s_m, s_fold, s_l, OutRows<Element>(p, b, seq.q0, h, grid.vector.out), mask, here.x, here.row0, folded, last);
    folded = true;
  }
}
