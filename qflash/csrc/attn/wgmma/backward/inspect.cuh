// Two warps, the inspectors, prepare what a tile of columns needs in addition to the TMA loads.
//
// If keys are stationary, they write lse and delta of the tile's queries to shared memory: queries are columns of the
// consumers' accumulators, and a lane has too many of them to load by itself. A query that does not exist, or sees
// nothing, gets weights of zero.
//
// In tiles that some row of the block does not see completely, weights of zero are multiplied with columns that the row
// must not see, and 0 times NaN is NaN. So NaN and infinity in operands of the gradient MMAs are replaced with finite
// numbers there, and tokens past the end of the sequence, which belong to a neighbour, with zeros. Rows that do see
// such a token get it back in the epilogue (nonfinite.cuh).
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/mma/nonfinite.cuh"
#include "attn/wgmma/backward/shared_memory.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// One token of a tile of columns, handled by one thread.
template <class Config>
struct Token {
  using Tile = typename Config::ColumnTile;
  char* s_token;  // in the first panel
  int rotation;   // neighbouring threads start at different chunks, and so in different banks

  __device__ __forceinline__ Token(char* s_tile, int token)
      : s_token(s_tile + token * Tile::kRowBytes), rotation(token % Tile::kChunks) {}
  __device__ __forceinline__ uint4& chunk(int i) const {
    const int panel = i / Tile::kChunks, in_panel = (i + rotation) % Tile::kChunks;
    return *reinterpret_cast<uint4*>(s_token + panel * Tile::kPanelBytes + in_panel * 16);
  }
  __device__ __forceinline__ bool nonfinite() const {
    using Element = typename Config::Element;
    bool found = false;
#pragma unroll 1
    for (int i = 0; i < Tile::kCount * Tile::kChunks; ++i) {
      const uint4 x = chunk(i);
      found |= word_nonfinite<Element>(x.x) | word_nonfinite<Element>(x.y) | word_nonfinite<Element>(x.z) |
               word_nonfinite<Element>(x.w);
    }
    return found;
  }
  // Zeros for NaN, the largest finite numbers for infinities: a softcap then saturates as it would for the original.
  __device__ __forceinline__ void tame() const {
    using Element = typename Config::Element;
    constexpr uint16_t kInfinity = uint16_t(Exponent<Element>::kBits);
#pragma unroll 1
    for (int i = 0; i < Tile::kCount * Tile::kChunks; ++i) {
      uint16_t* const s_elements = reinterpret_cast<uint16_t*>(&chunk(i));
#pragma unroll 1
      for (int e = 0; e < kPerChunk; ++e) {
        const uint16_t x = s_elements[e], magnitude = x & 0x7fff;
        if (magnitude >= kInfinity) s_elements[e] = magnitude > kInfinity ? 0 : x - 1;
      }
    }
  }
  __device__ __forceinline__ void clear() const {
#pragma unroll 1
    for (int i = 0; i < Tile::kCount * Tile::kChunks; ++i) chunk(i) = make_uint4(0, 0, 0, 0);
  }
  // Makes a token that exists finite, and returns whether it was nonfinite; clears one that does not.
  __device__ __forceinline__ bool make_finite(bool exists) const {
    if (!exists) {
      clear();
      return false;
    }
    if (!nonfinite()) return false;
    tame();
    return true;
  }
};

// Recomputed at each use to save registers.
template <class Config>
__device__ __forceinline__ int inspector_thread() {
  return fresh_tid() - (kWarpgroupThreads - Config::kInspectorThreads);
}

// In a tile that begins at column0, removes what must not reach rows that do not see it, and records if that was a
// token that some row may see. Operands of the gradient MMAs: Q and dO for dK and dV, K for dQ.
template <class Config>
__device__ __forceinline__ void clear_columns(WorkTile<Config>& work, const SharedMemory<Config>& s, int stage,
                                              int column0) {
#pragma unroll 1
  for (int i = inspector_thread<Config>(); i < Config::kBlockN; i += Config::kInspectorThreads) {
    const bool exists = column0 + i < work.mask.len_k;
    if (Token<Config>(s.first_columns + stage * Config::ColumnTile::kBytes, i).make_finite(exists)) work.cleared = 1;
    if constexpr (Config::kKeysStay) {
      if (Token<Config>(s.second_columns + stage * Config::ColumnTile::kBytes, i).make_finite(exists)) {
        work.cleared = 1;
        s.minus_delta[stage * Config::kBlockN + i] = nan();  // dO is nonfinite, and so is dP
      }
    }
  }
  fence_proxy_async();  // makes the zeros visible to wgmma
}

// Of one query.
struct Statistics {
  float minus_lse, delta;
};
template <class Config>
__device__ __forceinline__ Statistics statistics_of(const QfAttnParams& p, const float* g_delta,
                                                    const WorkTile<Config>& work, int head, int i) {
  if (i >= work.seq.len_q) return {-infinity(), 0.0f};
  const int64_t at = statistics_at(p, work.b, head, work.seq.q0, i);
  return {minus_lse2(p.lse[at]) + Config::kShift, g_delta[at]};
}

template <class Config>
__device__ __forceinline__ void inspect(const QfAttnParams& p, const float* g_delta, const SharedMemory<Config>& s) {
  constexpr int kOwn = Config::kKeysStay ? Config::kBlockN / Config::kInspectorThreads : 1;  // queries of a thread
  static_assert(kOwn >= 1, "");
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<Config::kStages> at;
  for (;; work_at.advance()) {
    work_at.wait_full(*s.work_ring);
    WorkTile<Config>& work = s.work[work_at.stage()];
    if (work.tiles < 0) return;
    for (int head = 0; head < work.heads; ++head)
      for (int n = 0; n < work.tiles; ++n, at.advance()) {
        const int column0 = work.columns.begin + n * Config::kBlockN, stage = at.stage();
        Statistics own[kOwn];
#pragma unroll
        for (int i = 0; Config::kKeysStay && i < kOwn; ++i)
          own[i] = statistics_of(p, g_delta, work, work.column_head + head,
                                 column0 + inspector_thread<Config>() + i * Config::kInspectorThreads);
        at.wait_empty(*s.column_ring);
#pragma unroll
        for (int i = 0; Config::kKeysStay && i < kOwn; ++i) {
          const int at_own = stage * Config::kBlockN + inspector_thread<Config>() + i * Config::kInspectorThreads;
          s.minus_lse[at_own] = own[i].minus_lse;
          s.minus_delta[at_own] = -own[i].delta;
        }
        if (!work.whole(column0)) {
          at.wait_full(*s.column_ring);
          clear_columns(work, s, stage, column0);
        }
        mbarrier_arrive(&s.inspected[stage]);
      }
    __syncwarp();  // every lane has read the work tile
    if (lane_index() == 0) work_at.release(*s.work_ring);
  }
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
