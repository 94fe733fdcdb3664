// fa_tc: FlashAttention on tensor cores through WMMA. float16 and bfloat16 in and out, sums and softmax in float32.
//
// One block computes kBlockM rows of one head, walking over the keys in tiles of kBlockN; a warp has its rows to
// itself:
//
//     Q, K (shared) -> fragments -> S (fragments) -> S (shared, by columns) -> a lane per row: softmax -> P (shared)
//     P, V (shared) -> fragments -> O (fragments, all the way)                 O's rescaling: a fragment of factors
//
// Fragments are opaque: no lane knows which scores it holds. So scores go to shared memory, where a lane can take a row
// to itself (32 rows a warp; 16 from head_dim 192 on, two lanes a row), and weights come back from there. O stays in
// fragments: what a row must be multiplied by is written 16 times side by side, loaded as a fragment of sums, and so
// falls into the same places as O. fa_mma, which knows its fragments, does without all of this.
//
// Registers of a lane at head_dim 128: 128 outputs and either 64 scores in fragments or 64 of its row.
//
// Shared memory (head_dim 128, Hopper: 128 rows, 64 keys, 4 warps, two blocks a multiprocessor), in bytes:
//   s_q       [kBlockM][kHeadDim + 8] 16-bit                       128 x 272 = 34816
//   s_k, s_v  [kBlockN][kHeadDim + 8] 16-bit                   2 x  64 x 272 = 34816
//   s_own     of each warp, one after the other:                   4 x  9216 = 36864
//             scores   [kBlockN][kWarpRows + 4] float32, a column per key
//             weights  [kWarpRows][kBlockN + 8] 16-bit, behind them
//             factors  [kWarpRows][24] float32, then the weights' rest like the weights
//             outputs  [kWarpRows][kOutColumns + 4] float32
//   s_state   256
// Together 106 752 bytes. Banks: attn/wmma/tile.cuh and docs/kernels/fa_tc.md.
//
// Pipeline: K and V have a buffer each, and one fills (cp.async) while the other is read: V of a tile behind Q Kt and
// the
//   softmax, K of the next behind P V. Two barriers a tile, at each a tile passes from the copying threads to the
//   reading warps and the other buffer back. Rotated or unaligned rows, and everything on Turing, go through registers
//   instead.
//
// V that is not finite is taken out of its tile and added to `out` by hand (attn/wmma/output.cuh). Rows that see few
// keys
//   multiply V by two 16-bit halves of their float16 weights (attn/wmma/softmax.cuh).
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

  {
    const Work work(p, grid);
    const Sequence seq = read_sequence(p, work.b);
    fill_unserved_rows<Element>(p, seq, work.b, work.h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
    if (!seq.good || work.row_tile * kBlockM >= seq.len_q) return;
    const int kv_head = work.h / (p.q_heads / p.kv_heads);
    const HeadRows<Element> k(p.kv.k, work.b, seq.k0, kv_head, 0, 0, false),
        v(p.kv.v, work.b, seq.k0, kv_head, 0, 0, false);
    s_state.fill(p, work, seq, k.g_head, v.g_head);
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int &b = s_state.b, &h = s_state.h;

  const auto load_q = [&] {
    const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, grid.vector.q);
    if constexpr (kAsync)
      copy_async<QWalk>(s_q, q.g_head, q.stride_t, s_state.block_row, seq.len_q, p.head_dim);
    else if (p.rope.cos)
      copy_rotated<QWalk>(s_q, q, s_state.block_row, p.rope, grid.vector.rope,
                          [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
    else
      copy_through_registers<QWalk>(s_q, q, s_state.block_row, aligned.q);
  };
  const auto rows_of = [&](const QfTensor& x, bool vector) {  // of K or V
    return HeadRows<Element>(x, b, seq.k0, h / (p.q_heads / p.kv_heads), seq.len_k, p.head_dim, vector);
  };
  const auto load_k = [&](int key0) {
    if constexpr (kAsync) {
      copy_async<KVWalk>(s_k, static_cast<const Element*>(s_state.k), p.kv.k.stride_t, key0, seq.len_k, p.head_dim);
      cp_async_commit();
    } else if (p.rope.cos) {
      copy_rotated<KVWalk>(s_k, rows_of(p.kv.k, grid.vector.k), key0, p.rope, grid.vector.rope,
                           [&](int j) { return position_k(p.rope, b, seq.k0, j); });
    } else {
      copy_through_registers<KVWalk>(s_k, rows_of(p.kv.k, grid.vector.k), key0, aligned.k);
    }
  };
  const auto load_v = [&](int key0) {
    if constexpr (kAsync) {
      copy_async<KVWalk>(s_v, static_cast<const Element*>(s_state.v), p.kv.v.stride_t, key0, seq.len_k, p.head_dim);
      cp_async_commit();
    } else {
      copy_through_registers<KVWalk>(s_v, rows_of(p.kv.v, grid.vector.v), key0, aligned.v);
    }
  };
  const auto wait_for_copies = [] {
    if constexpr (kAsync) cp_async_wait<0>();
  };

  // This warp's own: scores, and in their place weights with the factors, later their rest, behind them; in the end
  // outputs.
  const int warp = threadIdx.x / 32;
  char* const s_own = s_warps + warp * kWarpBytes;
  float* const s_scores = reinterpret_cast<float*>(s_own);
  Element* const s_weights = reinterpret_cast<Element*>(s_own);
  float* const s_factors = reinterpret_cast<float*>(s_own + kWeightBytes);
  Element* const s_rest = reinterpret_cast<Element*>(s_own + kWeightBytes);
  const Element* const s_q_rows = reinterpret_cast<Element*>(s_q) + warp * kWarpRows * kStride;

  const Lane lane(threadIdx.x % 32);
  const auto warp_row = [&] { return s_state.block_row + int(fresh_tid() / 32) * kWarpRows; };
  const auto out = [&] {
    Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + h * p.out.stride_h +
                           (seq.q0 + warp_row()) * p.out.stride_t;
    return Out{g_out, p.out.stride_t, seq.len_q - warp_row(), p.head_dim, aligned.out};
  };

  float O[kMTiles][kOTiles][8] = {};
  RowSum sum;
  bool keeps_rest = false;  // some row of the warp sees few keys
  if constexpr (KeepsRest<Element>::kValue) {
    const KeyRange seen = s_state.mask.visible(min(warp_row() + lane.row, seq.len_q - 1));
    keeps_rest = __any_sync(0xffffffffu, seen.end - seen.begin < kManyKeys);
  }
  bool tainted = false;  // V was not finite somewhere, and out holds what that gives

  int key0 = s_state.block_keys.begin / kBlockN * kBlockN;
  if (key0 < s_state.block_keys.end) {
    load_q();
    load_k(key0);
  }
#pragma unroll 1
  for (; key0 < s_state.block_keys.end; key0 += kBlockN) {
    const bool works = !s_state.idle(key0, kBlockN);

    wait_for_copies();
    __syncthreads();  // K is there (and Q, the first time); nobody reads V of the tile before any more
    load_v(key0);
    if (works) {
      qk_wmma<kMTiles, kNTiles, kHeadDim, kStride, kScoreStride>(s_scores, s_q_rows, reinterpret_cast<Element*>(s_k));
      __syncwarp();  // the scores are read by other lanes
      LaneScores<Lane> S;
      const TileMask<1> edges(s_state.mask, warp_row() + lane.row, key0);
      const bool moved = softmax_row<kScoreStride, kPStride, kFactorStride>(
          S, s_scores, s_weights, s_factors, lane, sum, p, !s_state.whole_for_warp(key0, kBlockN), edges.begin(0),
          edges.end(0), keeps_rest);
      __syncwarp();  // weights and factors are read by other lanes
      if (moved) scale_rows<kFactorStride>(O, s_factors);
      if (keeps_rest) {
        __syncwarp();  // every lane has its factors
        store_rounded<kPStride>(s_rest, lane, S, false);
      }
    }

    wait_for_copies();
    // V is there, and nobody reads K any more. The barrier also tells whether V is finite.
    if (__syncthreads_or(own_chunks_nonfinite<Element, KVWalk>(s_v))) {
      out().template add_nonfinite<kBlockN>(reinterpret_cast<Element*>(s_v), key0, s_state.mask, warp_row(), tainted);
      tainted = true;
      __syncthreads();  // every warp has seen them
      clear_nonfinite<Element, KVWalk>(s_v);
      __syncthreads();  // the zeros are in place
    }
    if (key0 + kBlockN < s_state.block_keys.end) load_k(key0 + kBlockN);
    if (works) {
#pragma unroll 1
      for (int pass = 0; pass <= int(keeps_rest); ++pass)
        pv_wmma<kBlockN, kPStride, kStride>(O, pass == 0 ? s_weights : s_rest, reinterpret_cast<Element*>(s_v));
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
  if (p.lse && lane.part == 0 && row < seq.len_q)
    p.lse[b * p.lse_stride_b + h * p.lse_stride_h + seq.q0 + row] = empty ? -infinity() : lse_of(sum.m, total);
  out().store(O, s_scores, tainted);
}
