// Tiles of K and V by the copy engine, through a ring that a warp of its own keeps full.
//
//   barrier   arrived at by                 waited for by
//   k_full    the copy engine, with bytes   consumers
//   v_full    the copy engine, with bytes   consumers
//   empty     a team's warps                loader
#pragma once

#include <cuda.h>

#include "attn/decode/config.cuh"
#include "attn/decode/share.cuh"
#include "ptx/barrier.cuh"
#include "ptx/names.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace decode {

struct TensorMaps {
  CUtensorMap k, v;
};

template <class Config>
struct TmaRing {
  using Tile = typename Config::Tile;
  static constexpr int kStages = Config::kStages, kStageBytes = 2 * Tile::kBytes;
  struct Barriers {
    Mbarrier k_full[kStages], v_full[kStages], empty[kStages];
  };
  char* tiles;  // kStages of K and V
  Barriers* barriers;

  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&barriers->k_full[i], 1);
      mbarrier_init(&barriers->v_full[i], 1);
      mbarrier_init(&barriers->empty[i], kTeamWarps);
      name_barrier(&barriers->k_full[i], "K full", i);
      name_barrier(&barriers->v_full[i], "V full", i);
      name_barrier(&barriers->empty[i], "empty", i);
    }
    fence_mbarrier_init();  // the barriers, to the copy engine
  }
};

// Where somebody stands in the ring.
template <int kStages>
struct RingWalk {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// One thread: all tiles of the block's share, as far ahead as there are empty stages.
template <class Config>
__device__ __forceinline__ void load_share(const QfAttnParams& p, const TensorMaps& maps, Share<Config::kBlockN> share,
                                           const TmaRing<Config>& ring, bool leads) {
  using Tile = typename Config::Tile;
  RingWalk<Config::kStages> at;
  for (Part part; share.next(part);) {
    const Seen<Config::kBlockN> seen(p, part.b);
    const int key0 = seen.first_key(), tiles = min(part.count, seen.tiles());
    for (int n = part.first; n < part.first + tiles; ++n, at.advance()) {
      if (!leads) continue;
      typename TmaRing<Config>::Barriers& barriers = *ring.barriers;
      mbarrier_wait(&barriers.empty[at.stage], at.parity ^ 1);
      char* const s_k = ring.tiles + at.stage * ring.kStageBytes;
      const auto copy = [&](char* s_tile, const CUtensorMap& map, Mbarrier* full) {
        mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll
        for (int panel = 0; panel < Tile::kCount; ++panel)
          copy_box(s_tile + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelColumns, key0 + n * Config::kBlockN,
                   part.kv_head, part.b, full);
      };
      copy(s_k, maps.k, &barriers.k_full[at.stage]);
      copy(s_k + Tile::kBytes, maps.v, &barriers.v_full[at.stage]);
    }
  }
}

// The ring as consumers see it: a Source (attend.cuh).
template <class Config>
class TmaTiles {
 public:
  __device__ __forceinline__ explicit TmaTiles(const TmaRing<Config>& ring) : ring_(ring) {}

  __device__ __forceinline__ bool is_mine() const { return next_ == int(threadIdx.x) / kTeamThreads; }
  __device__ __forceinline__ void skip() {
    next_ ^= 1;
    at_.advance();
  }
  __device__ __forceinline__ const char* wait_k() const {
    mbarrier_wait(&ring_.barriers->k_full[at_.stage], at_.parity);
    return ring_.tiles + at_.stage * ring_.kStageBytes;
  }
  __device__ __forceinline__ char* wait_v() const {
    mbarrier_wait(&ring_.barriers->v_full[at_.stage], at_.parity);
    return ring_.tiles + at_.stage * ring_.kStageBytes + Config::Tile::kBytes;
  }
  // What this thread wrote into the tile, before the copy engine writes there again.
  __device__ __forceinline__ void written() const { fence_proxy_async(); }
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring_.barriers->empty[at_.stage]);
    skip();
  }
  __device__ __forceinline__ void meet_team() const { barrier_sync(2 + threadIdx.x / kTeamThreads, kTeamThreads); }
  __device__ __forceinline__ void meet() const { barrier_sync(1, kConsumers); }

 private:
  TmaRing<Config> ring_;
  RingWalk<Config::kStages> at_;
  int next_ = 0;  // the team that takes the next tile
};

static_assert(kTeams == 2, "teams take turns");

}  // namespace decode
}  // namespace qf
