// fa_mma_bwd, queries stationary: dQ of kBlockRows queries of one head, with P and dS recomputed.
//
// The structure is fa_mma's: Q and dO of the block stay in shared memory, tiles of K and V stream by. There are no
// maxima and no sums, because lse is known: P = 2^(S - lse), dP = dO Vt, dS = P (dP - delta) in registers as A, and
// dQ += dS K, whose B operand is K's tile read transposed.
//
// Registers (head_dim 128, 32 rows per warp): 128 of dQ, 64 of S and dP of 32 keys, 16 of dS.
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/backward/output.cuh"
#include "attn/backward/state.cuh"
#include "attn/mma/backward.cuh"
#include "attn/schedule.cuh"
#include "kernels/attention_backward/fa_mma_bwd/load.cuh"

namespace qf {
namespace fa_mma_bwd {

constexpr int kQueryThreads = 32 * kQueryWarps, kWarpQueries = 16 * kMTiles;
using QueryWalk = ChunkWalk<kBlockRows, kChunks, kQueryThreads>;
using KeyTileWalk = ChunkWalk<kBlockColumns, kChunks, kQueryThreads>;
struct QueryState : StationaryState<kQueryWarps, kWarpQueries> {
  int kv_head;
};
static_assert(sizeof(QueryState) <= kStateBytes, "");

}  // namespace fa_mma_bwd
}  // namespace qf

// fwd.out is dq here, so that rows that no sequence serves are filled as the forward pass fills those of out.
template <bool kAsync, bool kPlain>
__global__ void __launch_bounds__(qf::fa_mma_bwd::kQueryThreads,
                                  qf::fa_mma_bwd::min_blocks(qf::fa_mma_bwd::kQueryThreads))
    qf_fa_mma_bwd_queries_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                                 const __grid_constant__ qf::fa_mma_bwd::Access access) {
  using namespace qf;
  using namespace qf::fa_mma_bwd;
  extern __shared__ float4 s_memory[];
  char* const s_q = reinterpret_cast<char*>(s_memory);
  char* const s_do = s_q + kStationaryBytes;
  char* const s_stream = s_do + kStationaryBytes;  // kStages pairs of tiles, K then V
  float* const s_lse = reinterpret_cast<float*>(s_stream + 2 * kStages * kTileBytes);  // -lse, then -delta, of rows
  QueryState& s_state = *reinterpret_cast<QueryState*>(reinterpret_cast<char*>(s_lse) + kStatisticsBytes);
  const QfAttnParams& p = params.fwd;
  constexpr int kStep = kQueryStep<kAsync, kPlain>;

  {
    const Work work(p, grid);
    const Sequence sequence = read_sequence(p, work.b);
    fill_unserved_rows<Element>(p, sequence, work.b, work.h, work.row_tile, grid.row_tiles, 0, p.head_dim, false);
    if (!sequence.good || work.row_tile * kBlockRows >= sequence.len_q) return;
    s_state.fill(sequence, mask_of_queries(p, sequence), work.b, work.h, work.row_tile * kBlockRows);
    if (threadIdx.x == 0) s_state.kv_head = work.h / (p.q_heads / p.kv_heads);
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int& b = s_state.b;

  const auto tile_at = [&](int key0) { return s_stream + key0 / kBlockColumns % kStages * (2 * kTileBytes); };
  const auto load_tile = [&](int key0) {
    char* const s_tile = tile_at(key0);
    load_k<kAsync, KeyTileWalk>(s_tile, p, seq, b, s_state.kv_head, key0, access);
    load_v<kAsync, KeyTileWalk>(s_tile + kTileBytes, p, seq, b, s_state.kv_head, key0, access);
    if constexpr (kAsync) cp_async_commit();
  };
  const auto first_key = [&] { return s_state.any.begin / kBlockColumns * kBlockColumns; };

  float dQ[kMTiles][kChunks][4] = {};
  for (int r = threadIdx.x; r < kBlockRows; r += kQueryThreads) {  // visible after the first tile's barrier
    const int row = s_state.first_row + r;
    const bool exists = row < seq.len_q;
    const int64_t place = statistics_at(p, b, s_state.h, seq.q0, exists ? row : 0);
    s_lse[r] = exists ? minus_lse2(p.lse[place]) + GradientShift<Element>::kWeights : -infinity();
    s_lse[kBlockRows + r] =
        exists ? -static_cast<const float*>(params.workspace)[place] * GradientShift<Element>::kGradient : 0.0f;
  }

  if (s_state.any.begin < s_state.any.end) {
    load_q<kAsync, QueryWalk>(s_q, p, seq, b, s_state.h, s_state.first_row, access);
    load_dout<kAsync, QueryWalk>(s_do, params, seq, b, s_state.h, s_state.first_row, access);
    if (kStages > 1) load_tile(first_key());
  }
  for (int key0 = first_key(); key0 < s_state.any.end; key0 += kBlockColumns) {
    const char* const s_k = tile_at(key0);
    const char* const s_v = s_k + kTileBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the previous tile
      load_tile(key0);
    }
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time those of Q and dO
    // As in the other kernel: makes the tile visible, frees the other stage; tests K for what zeros of dS do not mask.
    const bool whole = s_state.whole_for_block(key0, kBlockColumns);
    bool nonfinite = false;
    if (whole)
      __syncthreads();
    else
      nonfinite = __syncthreads_or(own_chunks_nonfinite<Element, KeyTileWalk, 1>(s_k));
    if (kStages > 1 && key0 + kBlockColumns < s_state.any.end) load_tile(key0 + kBlockColumns);
    if (!whole && s_state.idle(key0, kBlockColumns)) continue;

    const auto attend = [&](auto partial, auto step, int first) {  // to the tile's keys from `first` on, `step` of them
      constexpr bool kPartial = decltype(partial)::value;
      constexpr int kKeys = decltype(step)::value;
      const Scores<kPlain, kScoresAnew<kAsync, kPlain>> scores(p);
      const TileMask<8> mask(s_state.mask, s_state.row0(), key0 + first + QueryState::column());
      const auto of_rows = [](const float* s_x) {  // which all columns share
        const float* const s_row = s_x + fresh_tid() / 32 * kWarpQueries + fresh_tid() % 32 / 4;
        return [=](int i, int) {
          const float x[2] = {s_row[16 * i], s_row[16 * i + 8]};
          return Four{{x[0], x[0], x[1], x[1]}};
        };
      };
      const int warp_offset = fresh_tid() / 32 * kWarpQueries * kRowBytes;
      const char* const s_k_here = s_k + first * kRowBytes;
      float S[kMTiles][kKeys / 8][4] = {}, dP[kMTiles][kKeys / 8][4] = {};
      uint32_t A[kMTiles][kKeys / 16][4];
      qk_mma<Tensor, kChunks>(S, s_q + warp_offset, s_k_here, fresh_tid() % 32);
      weigh<Tensor, kPartial>(S, A, scores, of_rows(s_lse), mask);
      qk_mma<Tensor, kChunks>(dP, s_do + warp_offset, s_v + first * kRowBytes, fresh_tid() % 32);
      differentiate<Tensor, kPartial>(S, dP, A, GradientShift<Element>::kGradient, of_rows(s_lse + kBlockRows), mask);
      update_mma<Element, Tensor, kChunks, kPartial>(dQ, A, s_k_here, fresh_tid() % 32, nonfinite);
      if (kPartial && nonfinite)
        add_nonfinite_columns<Element, Tensor, kChunks>(dQ, A, s_k_here, fresh_tid() % 32, mask);
    };
    if (!whole && !s_state.whole_for_warp(key0, kBlockColumns)) {  // masks take registers: 16 keys at a time
#pragma unroll 1
      for (int first = 0; first < kBlockColumns; first += 16)
        attend(std::true_type{}, std::integral_constant<int, 16>{}, first);
    } else {
#pragma unroll 1
      for (int first = 0; first < kBlockColumns; first += kStep)
        attend(std::false_type{}, std::integral_constant<int, kStep>{}, first);
    }
  }

  // dQ through shared memory, float32 in the memory of Q and dO.
  __syncthreads();  // nobody reads what stands there any more
  stage_rows<kChunks>(dQ, s_q + threadIdx.x / 32 * kWarpQueries * (2 * kRowBytes), threadIdx.x % 32);
  __syncthreads();  // the rows are in place
  const int rows = min(kBlockRows, seq.len_q - s_state.first_row);
  const int exist = seq.len_k > 0 ? rows : 0;  // without keys a query has no position to be rotated to
  const GradientRows<Element> to(params.dq, b, seq.q0 + s_state.first_row, s_state.h, rows, exist, p.head_dim,
                                 p.scale * GradientShift<Element>::kOffGradient, access.dq);
  store_gradients<kHeadDim>(
      to, p.rope, p.rope.cos != nullptr,
      [&](int row, int d) { return reinterpret_cast<float*>(s_q + Swizzle<2 * kChunks>::offset(row, d / 4)); },
      [&](int row) { return position_q(p.rope, b, seq.q0, s_state.first_row + row, seq.len_q, seq.len_k); });
}
