// fa_mma_bwd, keys stationary: dK and dV of kBlockRows keys of one KV head, summed over the query heads that share it.
//
// K and V of the block stay in shared memory; tiles of Q and dO pass by, query head after query head, always in the
// same order, so that sums have the same bits every time. Per warp (kWarpKeys keys) and tile:
//
//   St = K Qt            kWarpKeys x kKeyStep, A from K, B from Q
//   Pt = 2^(St - lse)    registers, rounded where dV += Pt dO wants its A operand; B from dO, transposed
//   dPt = V dOt          A from V, B from dO
//   dSt = Pt (dPt - delta), rounded likewise; dK += dSt Q, B from Q, transposed
//
// Shared memory (head_dim 128, Hopper): K, V 2 x 32 KB, two stages of Q and dO 2 x 32 KB, lse and delta of the tiles
// 1 KB. At the end K's and V's places hold the gradients in float32. Rows are swizzled (smem/swizzle.cuh).
//
// Pipeline: cp.async fills one stage while the other is read, as in fa_mma, with one barrier a tile. lse and delta take
// the way through a register, which is fetched a tile ahead.
//
// Registers (head_dim 128): 128 of dK and dV, 32 of St and dPt, 8 of Pt or dSt. From head_dim 192 on dV and dK have
// kernels of their own, which compute St twice and dPt once.
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/backward/keys.cuh"
#include "attn/backward/output.cuh"
#include "attn/backward/state.cuh"
#include "attn/mma/backward.cuh"
#include "kernels/attention_backward/fa_mma_bwd/load.cuh"

namespace qf {
namespace fa_mma_bwd {

constexpr int kKeyThreads = 32 * kKeyWarps, kWarpKeys = 16 * kKeyMTiles;
using KeyWalk = ChunkWalk<kBlockRows, kChunks, kKeyThreads>;
using QueryTileWalk = ChunkWalk<kBlockColumns, kChunks, kKeyThreads>;
struct KeyState : StationaryState<kKeyWarps, kWarpKeys> {
  KeyRows owned;  // of the sequence
};
static_assert(sizeof(KeyState) <= kStateBytes && kKeyThreads >= 2 * kBlockColumns, "");

// Which gradients a kernel computes.
enum Of { kOfBoth, kOfValues, kOfKeys };

// Where the stream of (query head, tile of queries) stands.
struct Stream {
  int head, row0;

  __device__ static __forceinline__ Stream first(const QfAttnParams& p, const KeyState& state) {
    return {state.h * (p.q_heads / p.kv_heads), state.any.begin / kBlockColumns * kBlockColumns};
  }
  __device__ __forceinline__ Stream next(const KeyState& state) const {
    if (row0 + kBlockColumns < state.any.end) return {head, row0 + kBlockColumns};
    return {head + 1, state.any.begin / kBlockColumns * kBlockColumns};
  }
  __device__ __forceinline__ bool ends(const QfAttnParams& p, const KeyState& state) const {
    return state.any.begin >= state.any.end || head >= (state.h + 1) * (p.q_heads / p.kv_heads);
  }
};

}  // namespace fa_mma_bwd
}  // namespace qf

template <bool kAsync, qf::fa_mma_bwd::Of kOf>
__global__ void __launch_bounds__(qf::fa_mma_bwd::kKeyThreads, qf::fa_mma_bwd::min_blocks(qf::fa_mma_bwd::kKeyThreads))
    qf_fa_mma_bwd_keys_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::KeyGrid grid,
                              const __grid_constant__ qf::fa_mma_bwd::Access access) {
  using namespace qf;
  using namespace qf::fa_mma_bwd;
  extern __shared__ float4 s_memory[];
  char* const s_k = reinterpret_cast<char*>(s_memory);
  char* const s_v = s_k + kStationaryBytes;
  char* const s_stream = s_v + kStationaryBytes;  // kStages pairs of tiles, Q then dO
  float* const s_statistics = reinterpret_cast<float*>(s_stream + 2 * kStages * kTileBytes);  // -lse, then -delta
  KeyState& s_state = *reinterpret_cast<KeyState*>(reinterpret_cast<char*>(s_statistics) + kStatisticsBytes);
  const QfAttnParams& p = params.fwd;
  constexpr bool kWantsV = kOf != kOfKeys, kWantsK = kOf != kOfValues;

  {
    const KeyWork work(p, grid);
    const Sequence sequence = read_sequence(p, work.b);
    const KeyRows owned = read_key_rows(p, work.b);
    const int first_key = work.key_tile * kBlockRows;
    if (kWantsK) fill_unserved_keys<Element>(p, params.dk, owned, sequence.good, work, grid.key_tiles);
    if (kWantsV) fill_unserved_keys<Element>(p, params.dv, owned, sequence.good, work, grid.key_tiles);
    if (!sequence.good || !owned.known || first_key >= owned.owned) return;
    s_state.fill(sequence, mask_of_keys(p, sequence), work.b, work.h, first_key);
    if (threadIdx.x == 0) s_state.owned = owned;
  }
  __syncthreads();  // the state is in place
  const Sequence& seq = s_state.seq;
  const int& b = s_state.b;

  const auto load_tile = [&](int stage, const Stream& at) {
    char* const s_tile = s_stream + stage * 2 * kTileBytes;
    load_q<kAsync, QueryTileWalk>(s_tile, p, seq, b, at.head, at.row0, access);
    load_dout<kAsync, QueryTileWalk>(s_tile + kTileBytes, params, seq, b, at.head, at.row0, access);
    if constexpr (kAsync) cp_async_commit();
  };
  // One of the statistics of a tile, by thread: lse of its rows, then delta. Rows that do not exist have no weight.
  const auto fetch_statistic = [&](const Stream& at) {
    const int thread = fresh_tid(), row = at.row0 + thread % kBlockColumns;
    if (thread >= 2 * kBlockColumns || row >= seq.len_q) return thread < kBlockColumns ? -infinity() : 0.0f;
    const int64_t place = statistics_at(p, b, at.head, seq.q0, row);
    if (thread < kBlockColumns) return minus_lse2(p.lse[place]) + GradientShift<Element>::kWeights;
    return -static_cast<const float*>(params.workspace)[place] * GradientShift<Element>::kGradient;
  };
  const auto put_statistic = [&](int stage, float x) {
    const int thread = fresh_tid();
    if (thread < 2 * kBlockColumns) s_statistics[stage * 2 * kBlockColumns + thread] = x;
  };

  float dV[kKeyMTiles][kWantsV ? kChunks : 2][4] = {}, dK[kKeyMTiles][kWantsK ? kChunks : 2][4] = {};
  Stream now = Stream::first(p, s_state);
  float statistic = 0.0f;
  if (!now.ends(p, s_state)) {
    load_k<kAsync, KeyWalk>(s_k, p, seq, b, s_state.h, s_state.first_row, access);
    if (kWantsK) load_v<kAsync, KeyWalk>(s_v, p, seq, b, s_state.h, s_state.first_row, access);
    if (kStages > 1) load_tile(0, now);
    statistic = fetch_statistic(now);
  }
  int stage = 0;
  for (; !now.ends(p, s_state); now = now.next(s_state)) {
    const char* const s_q = s_stream + stage * 2 * kTileBytes;
    const char* const s_do = s_q + kTileBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the tile before
      load_tile(0, now);
    }
    put_statistic(stage, statistic);
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time those of K and V
    // The barrier makes the tile visible to all, and says that nobody reads the other stage any more. Where the tile is
    // masked in part, it also tells whether Q or dO holds something that zeros of P and dS would not blank out.
    const bool whole = s_state.whole_for_block(now.row0, kBlockColumns);
    bool nonfinite = false;
    if (whole)
      __syncthreads();
    else
      nonfinite = __syncthreads_or((kWantsK && own_chunks_nonfinite<Element, QueryTileWalk, 1>(s_q)) ||
                                   (kWantsV && own_chunks_nonfinite<Element, QueryTileWalk, 1>(s_do)));
    const float* const s_lse = s_statistics + stage * 2 * kBlockColumns;
    if (const Stream next = now.next(s_state); !next.ends(p, s_state)) {
      if (kStages > 1) load_tile(stage ^ 1, next);
      statistic = fetch_statistic(next);
    }
    if (kStages > 1) stage ^= 1;
    if (!whole && s_state.idle(now.row0, kBlockColumns)) continue;

    const auto attend = [&](auto partial, auto step, int first) {  // to `step` of the tile's queries, from `first` on
      constexpr bool kPartial = decltype(partial)::value;
      constexpr int kStep = decltype(step)::value;
      const Scores scores(p);
      const TileMask<8> mask(s_state.mask, s_state.row0(), now.row0 + first + KeyState::column());
      const auto of_columns = [&](const float* s_x) {  // which all rows share
        return [=](int, int j) {
          const float2 x = *reinterpret_cast<const float2*>(s_x + first + 8 * j + KeyState::column());
          return Four{{x.x, x.y, x.x, x.y}};
        };
      };
      const int warp_offset = fresh_tid() / 32 * kWarpKeys * kRowBytes;
      const char* const s_q_here = s_q + first * kRowBytes;
      const char* const s_do_here = s_do + first * kRowBytes;
      float S[kKeyMTiles][kStep / 8][4] = {};
      uint32_t A[kKeyMTiles][kStep / 16][4];
      qk_mma<Tensor, kChunks>(S, s_k + warp_offset, s_q_here, fresh_tid() % 32);
      weigh<Tensor, kPartial>(S, A, scores, of_columns(s_lse), mask);
      if constexpr (kWantsV) {
        update_mma<Element, Tensor, kChunks, kPartial>(dV, A, s_do_here, fresh_tid() % 32, nonfinite);
        if (kPartial && nonfinite)
          add_nonfinite_columns<Element, Tensor, kChunks>(dV, A, s_do_here, fresh_tid() % 32, mask);
      }
      if constexpr (kWantsK) {
        float dP[kKeyMTiles][kStep / 8][4] = {};
        qk_mma<Tensor, kChunks>(dP, s_v + warp_offset, s_do_here, fresh_tid() % 32);
        differentiate<Tensor, kPartial>(S, dP, A, GradientShift<Element>::kGradient, of_columns(s_lse + kBlockColumns),
                                        mask);
        update_mma<Element, Tensor, kChunks, kPartial>(dK, A, s_q_here, fresh_tid() % 32, nonfinite);
        if (kPartial && nonfinite)
          add_nonfinite_columns<Element, Tensor, kChunks>(dK, A, s_q_here, fresh_tid() % 32, mask);
      }
    };
    if (!whole && !s_state.whole_for_warp(now.row0, kBlockColumns)) {  // masks take registers: few queries at a time
#pragma unroll 1
      for (int first = 0; first < kBlockColumns; first += 16)
        attend(std::true_type{}, std::integral_constant<int, 16>{}, first);
    } else {
#pragma unroll 1
      for (int first = 0; first < kBlockColumns; first += kKeyStep<kAsync>)
        attend(std::false_type{}, std::integral_constant<int, kKeyStep<kAsync>>{}, first);
    }
  }

  // Gradients through shared memory, float32 in K's and V's places.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t left = s_state.owned.owned - s_state.first_row;
  const int rows = left < kBlockRows ? int(left) : kBlockRows;
  const int exist = max(0, min(rows, seq.len_k - s_state.first_row));
  const auto s_row = [&](int row, int d) {
    return reinterpret_cast<float*>(s_k + Swizzle<2 * kChunks>::offset(row, d / 4));
  };
  const auto store = [&](const auto& gradient, const QfTensor& x, float factor, bool rotated, bool aligned) {
    __syncthreads();  // nobody reads what stands there any more
    stage_rows<kChunks>(gradient, s_k + warp * kWarpKeys * (2 * kRowBytes), lane);
    __syncthreads();  // the rows are in place
    const GradientRows<Element> to(x, b, s_state.owned.first + s_state.first_row, s_state.h, rows, exist, p.head_dim,
                                   factor, aligned);
    store_gradients<kHeadDim>(to, p.rope, rotated, s_row,
                              [&](int row) { return position_k(p.rope, b, seq.k0, s_state.first_row + row); });
  };
  if constexpr (kWantsV) store(dV, params.dv, GradientShift<Element>::kOffWeights, false, access.dv);
  if constexpr (kWantsK)
    store(dK, params.dk, p.scale * GradientShift<Element>::kOffGradient, p.rope.cos != nullptr, access.dk);
}
