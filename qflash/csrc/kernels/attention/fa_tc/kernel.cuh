// fa_tc: FlashAttention on tensor cores through WMMA. float16 and bfloat16 in and out, float32 accumulators and
// softmax.
//
// One block computes kBlockM rows of one head in a main loop over tiles of kBlockN keys; each warp has its own rows:
//
//     Q, K (shared) -> fragments -> S (fragments) -> S (shared, by columns) -> a lane per row: softmax -> P (shared)
//     P, V (shared) -> fragments -> O (fragments, all the way)                 O's rescaling: a fragment of factors
//
// Fragments are opaque: no lane has the positions of its scores. So scores are written to shared memory, where a lane
// can take a full row (32 rows per warp; 16 from head_dim 192 on, two lanes per row), and weights are read back from
// there. O stays in fragments: a row's factor is written 16 times side by side, loaded as a fragment of accumulators,
// and so has the same positions as O. fa_mma, whose fragment layout is known, needs none of this.
//
// Registers of a lane at head_dim 128: 128 outputs and either 64 scores in fragments or 64 of its row.
//
// Shared memory (head_dim 128, Hopper: 128 rows, 64 keys, 4 warps, two blocks per SM), in bytes:
//   s_q       [kBlockM][kHeadDim + 8] 16-bit                       128 x 272 = 34816
//   s_k, s_v  [kBlockN][kHeadDim + 8] 16-bit                   2 x  64 x 272 = 34816
//   s_own     per warp, one after the other:                       4 x  9216 = 36864
//             scores   [kBlockN][kWarpRows + 4] float32, a column per key
//             weights  [kWarpRows][kBlockN + 8] 16-bit, followed by
//             factors  [kWarpRows][24] float32, then the weights' remainders like the weights
//             outputs  [kWarpRows][kOutColumns + 4] float32
//   s_state   320
// Together 106 816 bytes. Banks: attn/wmma/tile.cuh and docs/kernels/fa_tc.md.
//
// Pipeline: K and V have a buffer each, and one fills (cp.async) while the other is read: V of a tile during Q Kt and
//   the softmax, K of the next during P V. Two barriers per tile; at each, a tile passes from the copying threads to
//   the reading warps and the other buffer back. Rows that start at odd addresses, and everything on Turing, go through
//   registers instead.
//
// Remainders: rows that see few keys multiply V by two 16-bit halves of their float16 weights (attn/wmma/softmax.cuh).
//
// Does not serve rope, packed arrays and head dims that are no multiple of 8 (qflash/dispatch.py). NaN and infinity in
//   V reach the rows of a tile that do not see them, because 0 times NaN is NaN, and cannot be removed from a fragment
//   afterwards.
//
// Bound: shared memory. See docs/kernels/fa_tc.md.
#pragma once

#include "attn/mma/state.cuh"
#include "attn/schedule.cuh"
#include "attn/wmma/output.cuh"
#include "attn/wmma/product.cuh"
#include "attn/wmma/softmax.cuh"
#include "attn/wmma/tile.cuh"
#include "kernels/attention/fa_tc/config.h"

namespace qf {
namespace fa_tc {

using QWalk = PaddedWalk<kBlockM, kHeadDim / kPerChunk, kThreads>;
using KVWalk = PaddedWalk<kBlockN, kHeadDim / kPerChunk, kThreads>;
using State = BlockState<kWarps, kWarpRows>;
static_assert(sizeof(State) <= kStateBytes, "the state does not fit its place");
using Lane = LaneRow<kWarpRows, kBlockN>;
using Out = WarpOut<Element, kWarpRows, kHeadDim, kOutColumns>;

// Which tensors may be copied 16 bytes at a time.
struct Aligned {
  bool q, k, v, out;
};

}  // namespace fa_tc
}  // namespace qf

// kAsync: q, k and v are aligned, and are copied asynchronously.
template <bool kAsync>
__global__ void __launch_bounds__(qf::fa_tc::kThreads, qf::fa_tc::kMinBlocks)
    qf_fa_tc_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid,
                    const __grid_constant__ qf::fa_tc::Aligned aligned) {
  using namespace qf;
  using namespace qf::fa_tc;
  extern __shared__ float4 s_memory[];
  char* const s_q = reinterpret_cast<char*>(s_memory);
  char* const s_k = s_q + kQBytes;
  char* const s_v = s_k + kTileBytes;
  char* const s_warps = s_v + kTileBytes;
  State& s_state = *reinterpret_cast<State*>(s_warps + kWarps * kWarpBytes);
  if (!s_state.template begin<Element>(p, grid)) return;

  // This warp's rows of Q, and its private memory: scores, then in their place weights, followed by factors and, in the
  // place of the factors, remainders; in the end outputs.
  const int warp = threadIdx.x / 32;
  const Element* const s_q_rows = reinterpret_cast<Element*>(s_q) + warp * kWarpRows * kStride;
  char* const s_own = s_warps + warp * kWarpBytes;
  float* const s_scores = reinterpret_cast<float*>(s_own);
  Element* const s_weights = reinterpret_cast<Element*>(s_own);
  float* const s_factors = reinterpret_cast<float*>(s_own + kWeightBytes);
  Element* const s_remainders = reinterpret_cast<Element*>(s_own + kWeightBytes);
  const auto warp_row = [&] { return s_state.block_row + int(fresh_tid() / 32) * kWarpRows; };
  const Lane lane(threadIdx.x % 32);

  const auto load_q = [&] {
    const HeadRows<Element> q(p.q, s_state.b, 0, s_state.h, p.q_len, p.head_dim, false);
    load_tile<QWalk, kAsync>(s_q, q, s_state.block_row, aligned.q);
  };
  const auto rows_of = [&](const QfTensor& x, const void* g_head) {
    return HeadRows<Element>(static_cast<const Element*>(g_head), x.stride_t, s_state.seq.len_k, p.head_dim, false);
  };
  const auto load_k = [&](int key0) { load_tile<KVWalk, kAsync>(s_k, rows_of(p.kv.k, s_state.k), key0, aligned.k); };
  const auto load_v = [&](int key0) { load_tile<KVWalk, kAsync>(s_v, rows_of(p.kv.v, s_state.v), key0, aligned.v); };
  const auto wait_for_copies = [] {
    if constexpr (kAsync) cp_async_wait<0>();
  };

  float O[kMTiles][kOTiles][8] = {};
  RowSum sum;
  const bool keeps_remainders = kKeepsRemainders && s_state.sees_few();

  int key0 = s_state.block_keys.begin / kBlockN * kBlockN;
  if (key0 < s_state.block_keys.end) {
    load_q();
    load_k(key0);
  }
#pragma unroll 1
  for (; key0 < s_state.block_keys.end; key0 += kBlockN) {
    const bool works = !s_state.idle(key0, kBlockN);

    wait_for_copies();
    __syncthreads();  // K has arrived (and Q, the first time); no warp reads V of the previous tile any more
    load_v(key0);
    if (works) {
      qk_wmma<kMTiles, kNTiles, kHeadDim, kStride, kScoreStride>(s_scores, s_q_rows, reinterpret_cast<Element*>(s_k));
      __syncwarp();  // the scores are read by other lanes
      LaneScores<Lane> S;
      load_scores<kScoreStride>(S, s_scores, lane);
      if (!scales_plainly(p.scale, p.softcap)) scale_scores(S.groups, p.scale, p.softcap);
      if (!s_state.whole_for_warp(key0, kBlockN)) {
        const TileMask<1> edges(s_state.mask, warp_row() + lane.row, key0);
        mask_scores(S, lane, edges.begin(0), edges.end(0));
      }
      __syncwarp();  // every lane has read its scores: weights and factors take their place
      const float factor = score_factor(p.scale, p.softcap);
      const bool moved = online_softmax<kFactorStride>(S, lane, sum, factor, s_factors);
      store_weights<kPStride>(s_weights, lane, S, keeps_remainders);
      __syncwarp();  // weights and factors are read by other lanes
      if (moved) scale_rows<kFactorStride>(O, s_factors);
      if (keeps_remainders) {
        __syncwarp();  // every lane has its factors
        store_weights<kPStride>(s_remainders, lane, S, false);
      }
    }

    wait_for_copies();
    __syncthreads();  // V has arrived, and no warp reads K any more
    if (key0 + kBlockN < s_state.block_keys.end) load_k(key0 + kBlockN);
    if (works) {
#pragma unroll 1
      for (int pass = 0; pass <= int(keeps_remainders); ++pass)
        pv_wmma<kBlockN, kPStride, kStride>(O, pass == 0 ? s_weights : s_remainders, reinterpret_cast<Element*>(s_v));
    }
  }

  const int row = warp_row() + lane.row;
  const float total = Lane::sum_of_row(sum.l);
  const KeyRange keys = s_state.mask.visible(row);
  const bool empty = keys.begin == keys.end;
  __syncwarp();  // the weights of the last tile have been read
  store_factor<kFactorStride>(s_factors, lane, empty ? 0.0f : 1.0f / total);
  __syncwarp();  // the factors are read by other lanes
  scale_rows<kFactorStride>(O, s_factors);
  const int &b = s_state.b, &h = s_state.h;
  if (p.lse && lane.part == 0 && row < p.q_len)
    p.lse[b * p.lse_stride_b + h * p.lse_stride_h + row] = empty ? -infinity() : lse_of(sum.m, total);
  Element* const g_out =
      static_cast<Element*>(p.out.data) + b * p.out.stride_b + h * p.out.stride_h + warp_row() * p.out.stride_t;
  Out{g_out, p.out.stride_t, p.q_len - warp_row(), p.head_dim, aligned.out}.store(O, s_scores);
}
