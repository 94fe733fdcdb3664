// fa_warps: FlashAttention on CUDA cores with warps that rarely synchronize. All arithmetic in float32, for float32,
// float16 and bfloat16 arrays.
//
// One block computes kBlockM rows of one head in a main loop over tiles of kBlockN keys; each warp has its own rows:
//
//                K tile, complete (shared, arrays' type)     V tile, complete (shared, arrays' type)
//                       | read by every warp                        | read by every warp
//     warp 0 rows   S = Q Kt -> softmax by shuffles -> P (its own) -> O += P V     no barrier from left to right
//     warp 1 rows   S = Q Kt -> softmax by shuffles -> P (its own) -> O += P V     except the two described below
//     ...
//
// Roles: every warp does everything for its rows. Lane (y, x) owns 8 rows and kBlockN/kLanesX scores, kHeadDim/kLanesX
//   outputs of each (smem/lanes.cuh). Registers of a lane at head_dim 128: 64 outputs, 32 scores, 36 of operands, 16 of
//   maxima and sums; nothing is held in registers on its path to shared memory.
//
// Shared memory (head_dim 128, float32, Hopper: 128 rows, 64 keys, 8 warps, one block per SM), in floats:
//   s_q      [kBlockM][kHeadDim + 4]        scaled q                128 x 132 = 16896
//   s_p      [kBlockM][kBlockN + kLanesX]   weights                 128 x  80 = 10240   a warp reads only what it wrote
//   s_fold   [kBlockM]                      maxima at the last fold             128
//   s_state  320 bytes                                                           80
//   s_k      [kBlockN][kHeadDim] + 16 bytes per row                  64 x 132 =  8448   in the arrays' type
//   s_v      [kBlockN][kHeadDim]                                     64 x 128 =  8192   in the arrays' type
// Together 175 936 bytes. Banks are as in smem/lanes.cuh; 16-bit K rows, read 8 bytes at a time, start
//   (kHeadDim + 8) / 2 words apart, 4 or 20 mod 32: eight of them hit eight different pairs of banks.
//
// Pipeline: K and V have a buffer each, and one fills while the other is read. V of a tile is copied (cp.async) during
//   Q Kt and the softmax, K of the next during P V. Two barriers per tile, whatever head_dim is: at each, a tile passes
//   from the copying threads to the reading warps, and the other buffer back. On Turing, which has no cp.async, tiles
//   go through registers at the same places.
//
// Masks: as in `fa`. Tiles that some row sees only in part leave masked keys out of P V one by one: their weights are
//   0, but 0 times NaN or infinity in V would not be.
//
// Accumulators: float32 arrays fold O into `out` every kFoldKeys keys, as in `fa` (attn/cuda_core/fold.cuh).
//
// Does not serve rope and packed arrays (qflash/dispatch.py).
//
// Bound: the FMA units, as in `fa`. See docs/kernels/fa_warps.md.
#pragma once

#include "attn/cuda_core/fold.cuh"
#include "attn/cuda_core/product.cuh"
#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/mma/state.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "attn/tile_load.cuh"
#include "kernels/attention/fa_warps/config.h"
#include "reduce/lanes.cuh"

namespace qf {
namespace fa_warps {

using QWalk = TileWalk<kBlockM, kHeadDim, kThreads>;
using KvWalk = TileWalk<kBlockN, kHeadDim, kThreads>;
using LaneMask = TileMask<kLanesY>;
using State = BlockState<kWarps, kWarpRows>;
static_assert(sizeof(State) <= kStateBytes, "the state does not fit its place");

// A thread's position in the tile: its column x, its first row of the block (the others are kLanesY apart).
struct Place {
  int x, row;
  __device__ __forceinline__ explicit Place(int thread)
      : x(Lanes<kLanesX>::x(thread % 32)), row(thread / 32 * kWarpRows + Lanes<kLanesX>::y(thread % 32)) {}
};

}  // namespace fa_warps
}  // namespace qf

__global__ void __launch_bounds__(qf::fa_warps::kThreads, qf::fa_warps::kMinBlocks)
    qf_fa_warps_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid) {
  using namespace qf;
  using namespace qf::fa_warps;
  extern __shared__ float4 s_memory[];
  float* const s_q = reinterpret_cast<float*>(s_memory);
  float* const s_p = s_q + kQFloats;
  float* const s_fold = s_p + kPFloats;
  State& s_state = *reinterpret_cast<State*>(s_fold + kBlockM);
  Element* const s_k = reinterpret_cast<Element*>(s_fold + kBlockM + kStateBytes / 4);
  Element* const s_v = s_k + kKElements;
  if (!s_state.template begin<Element>(p, grid)) return;

  const Place place(threadIdx.x);
  const int x = place.x;
  float* const s_q_rows = s_q + place.row * kQStride;  // of this lane
  float* const s_p_rows = s_p + place.row * kPStride;
  float O[kRows][4 * kOutVecs] = {};
  float m[kRows], l[kRows];  // of the rows; l: this lane's share
#pragma unroll
  for (int r = 0; r < kRows; ++r) m[r] = -infinity(), l[r] = 0.0f;

  const auto load_q = [&] {
    const HeadRows<Element> q(p.q, s_state.b, 0, s_state.h, p.q_len, p.head_dim, grid.vector.q);
    load_scaled<QWalk, kQStride>(s_q, q, s_state.block_row, 0, query_scale(p.scale, p.softcap));
  };
  const auto rows_of = [&](const QfTensor& tensor, const void* g_head, bool vector) {
    return HeadRows<Element>(static_cast<const Element*>(g_head), tensor.stride_t, s_state.seq.len_k, p.head_dim,
                             vector);
  };
  const auto start_k = [&](int key0) {
    copy_tile<KvWalk, kKStride, kAsync>(s_k, rows_of(p.kv.k, s_state.k, grid.vector.k), key0);
  };
  const auto start_v = [&](int key0) {
    copy_tile<KvWalk, kVStride, kAsync>(s_v, rows_of(p.kv.v, s_state.v, grid.vector.v), key0);
  };
  const auto wait_for_copies = [] {  // of this thread
    if constexpr (kAsync) {
      cp_async_commit();
      cp_async_wait<0>();
    }
  };
  const auto mask_from = [&](int key) { return LaneMask(s_state.mask, s_state.block_row + place.row, key); };
  const auto fold_o = [&](bool folded, bool last) {
    const Place here(fresh_tid());
    const OutRows<Element> out(p, s_state.b, 0, s_state.h, grid.vector.out);
    fold_rows<kLanesX, kOutVecs, 1, 1, kFolds>(O, m, s_fold + here.row, l, out, s_state.mask, here.x,
                                               s_state.block_row + here.row, folded, last);
  };

  const int first_key = s_state.block_keys.begin / kBlockN * kBlockN, end = s_state.block_keys.end;
  bool folded = false;
  if (first_key < end) {
    start_k(first_key);
    load_q();
  }
#pragma unroll 1
  for (int key0 = first_key; key0 < end; key0 += kBlockN) {
    const bool works = !s_state.idle(key0, kBlockN), masked = !s_state.whole_for_warp(key0, kBlockN);

    wait_for_copies();
    __syncthreads();  // K passes from loaders to readers, and V back: no warp reads the previous tile any more
    start_v(key0);
    if (works) {
      float S[kRows][kScoreCols] = {}, rescale[kRows];
      qk_product<kLanesX, kScoreCols, kHeadDim, kQStride, kKStride, kQkUnroll>(S, s_q_rows, s_k + x * kKStride);
      if (p.softcap != 0.0f) apply_softcap(S, p.softcap);
      if (masked) mask_scores<kLanesX>(S, mask_from(key0 + x));
      online_softmax<kLanesX, 1, 1>(S, m, l, true, rescale);
      scale_rows(O, rescale);
      store_weights<kLanesX, kPStride>(s_p_rows + x, S);
      __syncwarp();  // the weights are read by other lanes of this warp
    }

    wait_for_copies();
    __syncthreads();  // V passes to the readers, and K back
    if (key0 + kBlockN < end) start_k(key0 + kBlockN);
    if (works && masked)
      pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(O, s_p_rows, s_v + 4 * x, mask_from(key0));
    else if (works)
      pv_product<kLanesX, kOutVecs, kBlockN, kPStride, kVStride>(O, s_p_rows, s_v + 4 * x, AllVisible{});

    if (kFolds && (key0 + kBlockN - first_key) % kFoldKeys == 0 && key0 + kBlockN < end) {
      fold_o(folded, false);
      folded = true;
    }
  }
  fold_o(folded, true);  // O divided by the sums of weights, and lse
}
