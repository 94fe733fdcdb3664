#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/mma/output.cuh"
#include "attn/mma/product.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/mma/state.cuh"
#include "attn/mma/tile.cuh"
#include "attn/schedule.cuh"
#include "kernels/fa_mma/config.h"

namespace qf {
namespace fa_mma {

using QWalk = ChunkWalk<kBlockM, kChunks, kThreads>;
using KVWalk = ChunkWalk<kBlockN, kChunks, kThreads>;
using State = BlockState<kWarps, kWarpRows>;
static_assert(sizeof(State) <= kStateBytes, "");

// Which tensors may be copied 16 bytes at a time.
struct Aligned {
  bool q, k, v, out;
};

}  // namespace fa_mma
}  // namespace qf

template <bool kAsync>
__global__ void __launch_bounds__(qf::fa_mma::kThreads, qf::fa_mma::kMinBlocks)
    qf_fa_mma_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::Grid grid,
                     const __grid_constant__ qf::fa_mma::Aligned aligned) {
  using namespace qf;
  using namespace qf::fa_mma;
  extern __shared__ float4 s_memory[];
  char* const s_q = reinterpret_cast<char*>(s_memory);
  char* const s_kv = s_q + kQBytes;  // kStages pairs of tiles, K then V
  State& s_state = *reinterpret_cast<State*>(s_kv + 2 * kStages * kTileBytes);

  const Work work(p, grid);
  const int b = work.b, h = work.h, kv_head = h / (p.q_heads / p.kv_heads);
  {
    const Sequence seq = read_sequence(p, b);
    fill_unserved_rows<Element>(p, seq, b, h, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
    const int block_row = work.row_tile * kBlockM;
    if (!seq.good || block_row >= seq.len_q) return;
    s_state.fill(p, seq, block_row);
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;

  const auto load_q = [&] {
    const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, grid.vector.q);
    if constexpr (kAsync) {
      copy_async<QWalk>(s_q, q, s_state.block_row);
    } else if (p.rope.cos) {
      copy_rotated<QWalk>(s_q, q, s_state.block_row, p.rope, grid.vector.rope,
                          [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
    } else {
      copy_through_registers<QWalk>(s_q, q, s_state.block_row, aligned.q);
    }
  };
  const auto rows_of = [&](const QfTensor& x, bool vector) {  // of K or V
    return HeadRows<Element>(x, b, seq.k0, kv_head, seq.len_k, p.head_dim, vector);
  };
  const auto load_kv = [&](char* s_tiles, int key0) {
    const HeadRows<Element> k = rows_of(p.k, grid.vector.k), v = rows_of(p.v, grid.vector.v);
    if constexpr (kAsync) {
      copy_async<KVWalk>(s_tiles, k, key0);
      copy_async<KVWalk>(s_tiles + kTileBytes, v, key0);
      cp_async_commit();
    } else {
      if (p.rope.cos)
        copy_rotated<KVWalk>(s_tiles, k, key0, p.rope, grid.vector.rope,
                             [&](int j) { return position_k(p.rope, b, seq.k0, j); });
      else
        copy_through_registers<KVWalk>(s_tiles, k, key0, aligned.k);
      copy_through_registers<KVWalk>(s_tiles + kTileBytes, v, key0, aligned.v);
    }
  };
  const auto s_q_of_warp = [&] { return s_q + fresh_tid() / 32 * (kWarpRows * kHeadDim * 2); };

  float O[kMTiles][kChunks][4] = {};
  RowStatistics<2 * kMTiles> rows;
  const ScoreScale scale(p.scale, p.softcap);

  int key0 = s_state.block_keys.begin / kBlockN * kBlockN;
  if (s_state.block_keys.begin < s_state.block_keys.end) {
    load_q();
    if (kStages > 1) load_kv(s_kv, key0);
  }
  for (int stage = 0; key0 < s_state.block_keys.end; key0 += kBlockN) {
    char* const s_k = s_kv + stage * 2 * kTileBytes;
    char* const s_v = s_k + kTileBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the tile before
      load_kv(s_k, key0);
    }
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time q's
    // The barrier makes the tile visible to all, and says that nobody reads the other stage any more. Where rows see
    // the tile only in part, it also tells whether V holds something that zero weights would not blank out.
    const bool nonfinite = __syncthreads_or(s_state.cut(key0, kBlockN) && own_chunks_nonfinite<Element, KVWalk>(s_v));
    if (nonfinite) {
      clear_nonfinite<Element, KVWalk>(s_v);
      __syncthreads();  // the zeros are in place
    }
    if (kStages > 1) {
      stage ^= 1;
      if (key0 + kBlockN < s_state.block_keys.end) load_kv(s_kv + stage * 2 * kTileBytes, key0 + kBlockN);
    }
    if (s_state.idle(key0, kBlockN)) continue;

    float S[kMTiles][kNTiles][4] = {};
    qk_mma<Tensor, kChunks>(S, s_q_of_warp(), s_k, fresh_tid() % 32);
    if (!scale.plain) soften_scores(S, scale);
    if (!s_state.whole(key0, kBlockN))
      mask_scores(S, TileMask<8>(s_state.mask, s_state.row0(), key0 + State::column()),
                  [](int j, int e) { return 8 * j + e; });
    online_softmax(S, scale.factor, rows, O);
    pv_mma<Tensor, kChunks>(O, S, s_v, fresh_tid() % 32);
    if (nonfinite)
      add_nonfinite(O, rows_of(p.v, false), key0, kBlockN, State::column(),
                    TileMask<8>(s_state.mask, s_state.row0(), key0));
  }

  const int lane = threadIdx.x % 32, warp_row = s_state.block_row + threadIdx.x / 32 * kWarpRows;
  if (warp_row >= seq.len_q) return;
  float* const g_lse = p.lse ? p.lse + b * p.lse_stride_b + h * p.lse_stride_h + seq.q0 : nullptr;
  finish_rows(O, rows, s_state.mask, s_state.row0(), g_lse, lane % 4 == 0);
  Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + h * p.out.stride_h +
                         (seq.q0 + warp_row) * p.out.stride_t;
  store_rows<Tensor>(O, s_q_of_warp(), g_out, p.out.stride_t, seq.len_q - warp_row, p.head_dim, aligned.out, lane);
}
