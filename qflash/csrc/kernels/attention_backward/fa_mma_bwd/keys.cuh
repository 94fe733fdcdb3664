// fa_mma_bwd, keys stationary: dK and dV of kBlockRows keys of one KV head, summed over the query heads that share it.
//
// K and V of the block stay in shared memory; tiles of Q and dO stream by, query head by query head, always in the same
// order, so that results are the same bit for bit every time. Per warp (kWarpKeys keys) and tile:
//
//   St = K Qt            kWarpKeys x kKeyStep, A from K, B from Q
//   Pt = 2^(St - lse)    registers, rounded to the A operand of dV += Pt dO; B from dO, transposed
//   dPt = V dOt          A from V, B from dO
//   dSt = Pt (dPt - delta), rounded likewise; dK += dSt Q, B from Q, transposed; stored for dQ where dS is kept
//
// Shared memory (head_dim 128, Hopper): K, V 2 x 32 KB, two stages of Q and dO 2 x 32 KB, lse and delta of the tiles
// 1 KB, Pt and dSt 32 KB. At the end the memory of K and V holds the gradients in float32. Rows are swizzled
// (smem/swizzle.cuh).
//
// Pairs (kKeyShare = 2): with 16 keys per warp every B fragment is read for one mma, and with 32 keys dK and dV do not
// fit the registers. So two warps share 32 keys. Each has half of the channels of dK and dV, and computes Pt and dSt of
// half of the queries, which the other reads as stored: A fragments, 16 bytes per lane.
//
// Pipeline: cp.async fills one stage while the other is read, as in fa_mma, with one barrier per tile, and one per
// pair. lse and delta go through a register, which is loaded one tile ahead.
//
// Registers (head_dim 128): 128 of dK and dV, 64 of St and dPt, 16 of Pt or dSt. From head_dim 192 on dV and dK have
// separate kernels, which compute St twice and dPt once.
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/backward/keys.cuh"
#include "attn/backward/output.cuh"
#include "attn/backward/state.cuh"
#include "attn/mma/backward.cuh"
#include "kernels/attention_backward/fa_mma_bwd/load.cuh"
#include "kernels/attention_backward/fa_mma_bwd/stored.cuh"
#include "ptx/barrier.cuh"

namespace qf {
namespace fa_mma_bwd {

constexpr int kKeyThreads = 32 * kKeyWarps, kWarpKeys = 16 * kKeyMTiles;
using KeyWalk = ChunkWalk<kBlockRows, kChunks, kKeyThreads>;
using QueryTileWalk = ChunkWalk<kBlockColumns, kChunks, kKeyThreads>;
constexpr int kKeyTiles = kKeepsDs ? kBlockRows / kDsTile : 1;
struct KeyState : StationaryState<kKeyWarps, kWarpKeys, kKeyShare> {
  KeyRows owned;             // of the sequence
  KeyRange stream;           // streamed queries: those that see keys of the block, or share a tile of dS with some
  int first_head, end_head;  // query heads that share the KV head
  KeyRange kept[kKeyTiles];  // queries that see keys of each 64 of the block
  int ds_place[kKeyTiles];   // position of their tiles of dS in strips
  char* g_ds;                // tiles of the first of the query heads

  // Collective, after fill().
  __device__ __forceinline__ void fill_stream(const QfAttnParams& p, const Mask& m, int batch, int head, int first,
                                              const StoredDs& ds, bool stores_ds) {
    const auto seen_by = [&](int row, int rows) {
      const int last = min(row + rows, m.len_q) - 1;
      return row < m.len_q ? m.seen_by_any(row, last) : KeyRange{0, 0};
    };
    const int multiple = stores_ds ? kDsTile : 1, thread = threadIdx.x;
    if (thread == 0) {
      const KeyRange seen = seen_by(first, kBlockRows);
      const int group = p.q_heads / p.kv_heads;
      stream = {seen.begin / multiple * multiple, (seen.end + multiple - 1) / multiple * multiple};
      first_head = head * group;
      end_head = first_head + group;
      if (stores_ds) g_ds = ds.head(p, batch, first_head);
    }
    if (thread < kKeyTiles && stores_ds) {
      kept[thread] = seen_by(first + thread * kDsTile, kDsTile);
      ds_place[thread] = ds.tiles.place(first / kDsTile + thread);
    }
  }
};
static_assert(sizeof(KeyState) <= kStateBytes && kKeyThreads >= 2 * kBlockColumns, "");

// Pt and dSt that a pair of warps exchanges.
enum Exchanged { kWeights, kGradients };
struct Exchange {
  char* s_pair;

  __device__ static __forceinline__ Exchange of_warp(char* s_exchange) {
    return {s_exchange + KeyState::part() * (kExchangeBytes / KeyState::kParts)};
  }
  // The lane's words of the A fragment of keys 16 i .. and of queries 16 step .. of the tile.
  __device__ __forceinline__ uint4& at(Exchanged what, int step, int i, int lane) const {
    const int fragment = (what * (kBlockColumns / 16) + step) * kKeyMTiles + i;
    return *reinterpret_cast<uint4*>(s_pair + fragment * 512 + lane * 16);
  }
  template <int kSteps>
  __device__ __forceinline__ void put(Exchanged what, int step, const uint32_t (&A)[kKeyMTiles][kSteps][4],
                                      int lane) const {
#pragma unroll
    for (int i = 0; i < kKeyMTiles; ++i)
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        at(what, step + k, i, lane) = make_uint4(A[i][k][0], A[i][k][1], A[i][k][2], A[i][k][3]);
  }
  __device__ __forceinline__ void get(Exchanged what, int step, uint32_t (&A)[kKeyMTiles][1][4], int lane) const {
#pragma unroll
    for (int i = 0; i < kKeyMTiles; ++i) {
      const uint4 x = at(what, step, i, lane);
      A[i][0][0] = x.x, A[i][0][1] = x.y, A[i][0][2] = x.z, A[i][0][3] = x.w;
    }
  }
};

// Which gradients a kernel computes.
enum Of { kOfBoth, kOfValues, kOfKeys };

// Position in the stream of (query head, tile of queries).
struct Stream {
  int head, row0;

  __device__ static __forceinline__ Stream first(const KeyState& state) {
    return {state.first_head, state.stream.begin / kBlockColumns * kBlockColumns};
  }
  __device__ __forceinline__ Stream next(const KeyState& state) const {
    if (row0 + kBlockColumns < state.stream.end) return {head, row0 + kBlockColumns};
    return {head + 1, state.stream.begin / kBlockColumns * kBlockColumns};
  }
  __device__ __forceinline__ bool ends(const KeyState& state) const {
    return state.stream.begin >= state.stream.end || head >= state.end_head;
  }
};

}  // namespace fa_mma_bwd
}  // namespace qf

template <bool kAsync, bool kPlain, qf::fa_mma_bwd::Of kOf>
__global__ void __launch_bounds__(qf::fa_mma_bwd::kKeyThreads, qf::fa_mma_bwd::kKeyBlocks)
    qf_fa_mma_bwd_keys_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::KeyGrid grid,
                              const __grid_constant__ qf::fa_mma_bwd::Access access,
                              const __grid_constant__ qf::fa_mma_bwd::StoredDs ds) {
  using namespace qf;
  using namespace qf::fa_mma_bwd;
  extern __shared__ float4 s_memory[];
  char* const s_k = reinterpret_cast<char*>(s_memory);
  char* const s_v = s_k + kStationaryBytes;
  char* const s_stream = s_v + kStationaryBytes;  // kStages pairs of tiles, Q then dO
  float* const s_statistics = reinterpret_cast<float*>(s_stream + 2 * kStages * kTileBytes);  // -lse, then -delta
  KeyState& s_state = *reinterpret_cast<KeyState*>(reinterpret_cast<char*>(s_statistics) + kStatisticsBytes);
  char* const s_exchange = reinterpret_cast<char*>(&s_state) + kStateBytes;
  const QfAttnParams& p = params.fwd;
  constexpr bool kWantsV = kOf != kOfKeys, kWantsK = kOf != kOfValues;
  const bool stores_ds = kKeepsDs && kWantsK && ds.g_tiles != nullptr;

  {
    const KeyWork work(p, grid);
    const Sequence sequence = read_sequence(p, work.b);
    const KeyRows owned = read_key_rows(p, work.b);
    const int first_key = work.key_tile * kBlockRows;
    if (kWantsK) fill_unserved_keys<Element>(p, params.dk, owned, sequence.good, work, grid.key_tiles);
    if (kWantsV) fill_unserved_keys<Element>(p, params.dv, owned, sequence.good, work, grid.key_tiles);
    if (!sequence.good || !owned.known || first_key >= owned.owned) return;
    const Mask mask = mask_of_keys(p, sequence);
    s_state.fill(sequence, mask, work.b, work.h, first_key);
    s_state.fill_stream(p, mask, work.b, work.h, first_key, ds, stores_ds);
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
  // One statistic of a tile per thread: lse of its rows, then delta. Rows that do not exist have no weight.
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

  float dV[kKeyMTiles][kWantsV ? kKeyChunks : 2][4] = {}, dK[kKeyMTiles][kWantsK ? kKeyChunks : 2][4] = {};
  Stream now = Stream::first(s_state);
  float statistic = 0.0f;
  if (!now.ends(s_state)) {
    load_k<kAsync, KeyWalk>(s_k, p, seq, b, s_state.h, s_state.first_row, access);
    if (kWantsK) load_v<kAsync, KeyWalk>(s_v, p, seq, b, s_state.h, s_state.first_row, access);
    if (kStages > 1) load_tile(0, now);
    statistic = fetch_statistic(now);
  }
  int stage = 0;
  for (; !now.ends(s_state); now = now.next(s_state)) {
    const char* const s_q = s_stream + stage * 2 * kTileBytes;
    const char* const s_do = s_q + kTileBytes;
    if (kStages == 1) {
      __syncthreads();  // every warp is done with the previous tile
      load_tile(0, now);
    }
    put_statistic(stage, statistic);
    if constexpr (kAsync) cp_async_wait<0>();  // this tile's copies, and the first time those of K and V
    // The barrier makes the tile visible to all warps, and after it no warp reads the other stage any more. Where the
    // tile is partly masked, it also returns whether Q or dO holds something that zeros of P and dS would not mask.
    const bool whole = s_state.whole_for_block(now.row0, kBlockColumns);
    bool nonfinite = false;
    if (whole)
      __syncthreads();
    else
      nonfinite = __syncthreads_or((kWantsK && own_chunks_nonfinite<Element, QueryTileWalk, 1>(s_q)) ||
                                   (kWantsV && own_chunks_nonfinite<Element, QueryTileWalk, 1>(s_do)));
    const float* const s_lse = s_statistics + stage * 2 * kBlockColumns;
    if (const Stream next = now.next(s_state); !next.ends(s_state)) {
      if (kStages > 1) load_tile(stage ^ 1, next);
      statistic = fetch_statistic(next);
    }
    if (kStages > 1) stage ^= 1;
    // Where dS of the warp's keys and this tile's queries is stored.
    const uint32_t key = KeyState::part() * kWarpKeys, key_tile = key / kDsTile % kKeyTiles;
    char* g_ds = nullptr;
    if (stores_ds)
      g_ds = ds.tile(s_state.g_ds + (now.head - s_state.first_head) * ds.head_bytes, uint32_t(now.row0) / kDsTile,
                     s_state.ds_place[key_tile]);
    const auto keep_ds = [&](const auto& A, int first) {
      store_ds(g_ds, A, KeyState::part() * kWarpKeys % kDsTile, uint32_t(now.row0 + first) % kDsTile,
               uint32_t(fresh_tid()) % 32);
    };
    if (!whole && s_state.idle(now.row0, kBlockColumns)) {
      if (stores_ds && keeps_tile(s_state.kept[key_tile], now.row0 / kDsTile * kDsTile)) {
        const uint32_t zeros[kKeyMTiles][1][4] = {};
#pragma unroll 1
        for (int first = 0; first < kBlockColumns; first += 16) keep_ds(zeros, first);
      }
      continue;
    }

    const auto mask_from = [&](int first) {
      return TileMask<8>(s_state.mask, s_state.row0(), now.row0 + first + KeyState::column());
    };
    // gradient += A X, for this tile's queries from `first` on. s_x: the tile's Q or dO.
    const auto update = [&](auto partial, auto& gradient, const auto& A, const char* s_x, int first) {
      constexpr bool kPartial = decltype(partial)::value;
      const char* const s_here = s_x + first * kRowBytes + fresh_tid() / 32 % kKeyShare * (kKeyChunks * 16);
      update_mma<Element, Tensor, kChunks, kPartial>(gradient, A, s_here, fresh_tid() % 32, nonfinite);
      if (kPartial && nonfinite)
        add_nonfinite_columns<Element, Tensor, kChunks>(gradient, A, s_here, fresh_tid() % 32, mask_from(first));
    };
    const Exchange exchange = Exchange::of_warp(s_exchange);
    const auto attend = [&](auto partial, auto step, int first) {  // to `step` of the tile's queries, from `first` on
      constexpr bool kPartial = decltype(partial)::value;
      constexpr int kStep = decltype(step)::value;
      const Scores<kPlain> scores(p);
      const TileMask<8> mask = mask_from(first);
      const auto of_columns = [&](const float* s_x) {  // which all rows share
        const float* const s_here = s_x + first + KeyState::column();
        return [=](int, int j) {
          const float2 x = *reinterpret_cast<const float2*>(s_here + 8 * j);
          return Four{{x.x, x.y, x.x, x.y}};
        };
      };
      const int part_offset = KeyState::part() * (kWarpKeys * kRowBytes);
      float S[kKeyMTiles][kStep / 8][4] = {};
      qk_mma<Tensor, kChunks>(S, s_k + part_offset, s_q + first * kRowBytes, fresh_tid() % 32);
      [[maybe_unused]] float dP[kKeyMTiles][kStep / 8][4] = {};
      if constexpr (kWantsK) qk_mma<Tensor, kChunks>(dP, s_v + part_offset, s_do + first * kRowBytes, fresh_tid() % 32);
      [[maybe_unused]] uint32_t P[kKeyMTiles][kStep / 16][4], dS[kKeyMTiles][kStep / 16][4];
      weigh<Tensor, kPartial>(S, P, scores, of_columns(s_lse), mask);
      if constexpr (kWantsK) {
        differentiate<Tensor, kPartial>(S, dP, dS, GradientShift<Element>::kGradient, of_columns(s_lse + kBlockColumns),
                                        mask);
        if constexpr (kPartial) clear_missing_rows(dS, s_state.row0(), s_state.mask.len_q);
        if (!kStoresDsLast && stores_ds) keep_ds(dS, first);
      }
      if constexpr (kKeyShare == 2) {
        exchange.put(kWeights, first / 16, P, fresh_tid() % 32);
        exchange.put(kGradients, first / 16, dS, fresh_tid() % 32);
      } else {
        if constexpr (kWantsV) update(partial, dV, P, s_do, first);
        if constexpr (kWantsK) update(partial, dK, dS, s_q, first);
        if (kStoresDsLast && stores_ds) keep_ds(dS, first);
      }
    };
    // Adds what the pair stored for all of the tile's queries.
    const auto update_from_pair = [&](auto partial) {
      barrier_sync<64>(1 + KeyState::part());  // both have put their Pt and dSt
#pragma unroll(decltype(partial)::value ? 1 : kBlockColumns / 16)
      for (int first = 0; first < kBlockColumns; first += 16) {
        uint32_t A[kKeyMTiles][1][4];
        exchange.get(kWeights, first / 16, A, fresh_tid() % 32);
        update(partial, dV, A, s_do, first);
        exchange.get(kGradients, first / 16, A, fresh_tid() % 32);
        update(partial, dK, A, s_q, first);
      }
    };
    constexpr int kOwn = kBlockColumns / kKeyShare;  // queries that a warp attends to
    const int own = fresh_tid() / 32 % kKeyShare * kOwn;
    if (!whole && !s_state.whole_for_warp(now.row0, kBlockColumns)) {  // masks take registers: few queries at a time
#pragma unroll 1
      for (int first = own; first < own + kOwn; first += 16)
        attend(std::true_type{}, std::integral_constant<int, 16>{}, first);
      if constexpr (kKeyShare == 2) update_from_pair(std::true_type{});
    } else {
#pragma unroll 1
      for (int first = own; first < own + kOwn; first += kKeyStep<kAsync, kPlain>)
        attend(std::false_type{}, std::integral_constant<int, kKeyStep<kAsync, kPlain>>{}, first);
      if constexpr (kKeyShare == 2) update_from_pair(std::false_type{});
    }
  }

  // Stores the gradients through shared memory, float32 in the memory of K and V.
  const int64_t left = s_state.owned.owned - s_state.first_row;
  const int rows = left < kBlockRows ? int(left) : kBlockRows;
  const int exist = max(0, min(rows, seq.len_k - s_state.first_row));
  const auto s_row = [&](int row, int d) {
    return reinterpret_cast<float*>(s_k + Swizzle<2 * kChunks>::offset(row, d / 4));
  };
  const auto store = [&](const auto& gradient, const QfTensor& x, float factor, bool rotated, bool aligned) {
    __syncthreads();  // nobody reads what stands there any more
    stage_rows<kChunks>(gradient, s_k + KeyState::part() * (kWarpKeys * 2 * kRowBytes), threadIdx.x % 32,
                        threadIdx.x / 32 % kKeyShare * kKeyChunks);
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
