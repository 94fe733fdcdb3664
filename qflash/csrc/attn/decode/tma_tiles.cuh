// Tiles of K and V by TMA, the copy engine, through a ring that a dedicated warp keeps full.
//
//   barrier   arrived at by                 waited for by
//   k_full    TMA, with bytes               consumers
//   v_full    TMA, with bytes               consumers
//   empty     a team's warps                loader
//   unit full   prepare_units, each lane    consumers
//   unit empty  consumers, a warp each      prepare_units
#pragma once

#include <cuda.h>

#include "attn/decode/config.cuh"
#include "attn/decode/merge.cuh"
#include "attn/decode/queries.cuh"
#include "hopper/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/names.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace decode {

struct TensorMaps {
  CUtensorMap k, v;
};

constexpr int kUnitStages = 2;

template <class Config>
struct TmaRing {
  using KeyTile = typename Config::KeyTile;
  static constexpr int kStages = Config::kStages, kStageBytes = KeyTile::kBytes + Config::Tile::kBytes;
  // A stage always belongs to the same team; otherwise a team might wait for a phase of a barrier before the previous
  // one is over.
  static_assert(kStages % Config::kTeams == 0, "");
  struct Barriers {
    Mbarrier k_full[kStages], v_full[kStages], empty[kStages];
    Ring<kUnitStages> unit;
  };
  char* tiles;    // kStages of K and V
  float* scales;  // kStages of theirs, where they are bytes
  char* queries;  // kUnitStages
  Unit<Config>* units;
  Barriers* barriers;

  __device__ __forceinline__ float* k_scales(int stage) const { return scales + 2 * stage * Config::kBlockN; }
  __device__ __forceinline__ float* v_scales(int stage) const { return k_scales(stage) + Config::kBlockN; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&barriers->k_full[i], 1);
      mbarrier_init(&barriers->v_full[i], 1);
      mbarrier_init(&barriers->empty[i], Config::kTeamWarps);
      name_barrier(&barriers->k_full[i], "K full", i);
      name_barrier(&barriers->v_full[i], "V full", i);
      name_barrier(&barriers->empty[i], "empty", i);
    }
    barriers->unit.init(Config::kWarps, "unit full", "unit empty", 3 * 32);
    fence_mbarrier_init();  // makes the barriers visible to TMA
  }
};

// A position in the ring.
template <int kStages>
struct RingWalk {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// One warp loads all tiles of the block's share, as far ahead as there are empty stages.
template <class Config>
__device__ __forceinline__ void load_share(const QfAttnParams& p, const TensorMaps& maps, Share<Config> share,
                                           const TmaRing<Config>& ring) {
  using Tile = typename Config::Tile;
  using KeyTile = typename Config::KeyTile;
  if (threadIdx.x % 32 != 0) return;
  RingWalk<Config::kStages> at;
  for (; !share.is_over(); share.advance(p)) {
    const Part part = share.part();
    const Seen<Config> seen(p, part.b);
    const int tiles = seen.tiles(part);
    int key0 = seen.first_key(part);
    for (int n = 0; n < tiles; ++n, key0 += Config::kBlockN, at.advance()) {
      typename TmaRing<Config>::Barriers& barriers = *ring.barriers;
      mbarrier_wait(&barriers.empty[at.stage], at.parity ^ 1);
      char* const s_k = ring.tiles + at.stage * ring.kStageBytes;
      const auto copy = [&](auto tile, char* s_tile, const CUtensorMap& map, Mbarrier* full) {
        mbarrier_arrive_expect(full, tile.kBytes);
#pragma unroll
        for (int panel = 0; panel < tile.kCount; ++panel)
          copy_box(s_tile + panel * tile.kPanelBytes, &map, panel * tile.kPanelColumns, key0, part.kv_head, part.b,
                   full);
      };
      copy(KeyTile(), s_k, maps.k, &barriers.k_full[at.stage]);
      copy(Tile(), s_k + KeyTile::kBytes, maps.v, &barriers.v_full[at.stage]);
    }
  }
  let_next_grid_start();
}

// Three warps prepare the block's units for the consumers, one unit ahead, and do not wait for each other: one warp
// alone would barely be done with all of this by the end of a short call. Collective for a warp. make(part, stage,
// over): prepares a unit; with kAtLast, when the share is done, also the unit that this block ends and did not begin
// (part.parts is 0: there is none). then(part): work on a unit that no warp waits for.
template <class Config, bool kAtLast = true, class Make, class Then>
__device__ __forceinline__ void prepare_units(const QfAttnParams& p, Share<Config> share, const TmaRing<Config>& ring,
                                              Make make, Then then) {
  Part ended{};
  RingPosition<kUnitStages> at;
  for (;; share.advance(p), at.advance()) {
    const bool over = share.is_over();
    const Part part = kAtLast && over ? ended : share.part();
    if (!over && part.ends() && !part.is_whole()) ended = part;
    at.wait_empty(ring.barriers->unit);
    if (kAtLast || !over) make(part, at.stage(), over);
    at.fill(ring.barriers->unit);  // each lane, what it wrote
    if (over) return;
    then(part);
  }
}

// The first of them: describes a unit.
template <class Config>
__device__ __forceinline__ void describe_units(const QfAttnParams& p, const Share<Config>& share,
                                               const TmaRing<Config>& ring) {
  const auto describe = [&](const Part& part, int stage, bool over) {
    describe_unit<Config>(p, part, ring.units[stage]);
    if (over && threadIdx.x % 32 == 0) ring.units[stage].tiles = -1;
  };
  prepare_units(p, share, ring, describe, [](const Part&) {});
}

// The second: loads its queries.
template <class Config>
__device__ __forceinline__ void load_queries(const QfAttnParams& p, const Aligned& aligned, const Share<Config>& share,
                                             const TmaRing<Config>& ring) {
  const auto load = [&](const Part& part, int stage, bool over) {
    if (over && !(part.parts > 0 && wants_dot_k_mean(p))) return;  // once more, for the block that finishes its rows
    fetch_queries<Config>(p, aligned, part, ring.queries + stage * Config::kQueryBytes, threadIdx.x % 32, 32);
  };
  prepare_units<Config, Config::kInt8Queries>(p, share, ring, load, [](const Part&) {});
}

// The third: clears the place of its partial results.
template <class Config>
__device__ __forceinline__ void clear_parts(const QfAttnParams& p, const Share<Config>& share, const Partials& partials,
                                            const TmaRing<Config>& ring) {
  const auto clear = [&](const Part& part, int, bool over) {
    if (over) {
      if (part.parts > 0) partials.await_announcements(part);
    } else if (!part.ends()) {
      partials.clear(part);  // before consumers see the unit, and store
    }
  };
  prepare_units(p, share, ring, clear, [&](const Part& part) {
    if (!part.ends()) partials.announce(part);
  });
}

// The ring as consumers see it: a Source (attend.cuh).
template <class Config>
class TmaTiles {
 public:
  __device__ __forceinline__ explicit TmaTiles(const TmaRing<Config>& ring) : ring_(ring) {}

  __device__ __forceinline__ int next_team() const { return next_; }
  __device__ __forceinline__ bool is_mine() const { return next_ == int(threadIdx.x) / Config::kTeamThreads; }
  __device__ __forceinline__ void skip() {
    if (++next_ == Config::kTeams) next_ = 0;
    at_.advance();
  }
  __device__ __forceinline__ const char* wait_k() const {
    mbarrier_wait(&ring_.barriers->k_full[at_.stage], at_.parity);
    return ring_.tiles + at_.stage * ring_.kStageBytes;
  }
  __device__ __forceinline__ char* wait_v() const {
    mbarrier_wait(&ring_.barriers->v_full[at_.stage], at_.parity);
    return ring_.tiles + at_.stage * ring_.kStageBytes + Config::KeyTile::kBytes;
  }
  // Scales of the tile's keys, once K and V have arrived.
  __device__ __forceinline__ const float* k_scales() const { return ring_.k_scales(at_.stage); }
  __device__ __forceinline__ const float* v_scales() const { return ring_.v_scales(at_.stage); }
  // Makes this thread's writes to the tile visible before TMA writes there again.
  __device__ __forceinline__ void written() const { fence_proxy_async(); }
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&ring_.barriers->empty[at_.stage]);
    skip();
  }
  __device__ __forceinline__ const Unit<Config>& wait_unit() const {
    unit_at_.wait_full(ring_.barriers->unit);
    return ring_.units[unit_at_.stage()];
  }
  __device__ __forceinline__ const char* queries() const {
    return ring_.queries + unit_at_.stage() * Config::kQueryBytes;
  }
  __device__ __forceinline__ void release_unit() {
    __syncwarp();  // all lanes have read
    if (threadIdx.x % 32 == 0) unit_at_.release(ring_.barriers->unit);
    unit_at_.advance();
  }
  template <int kTeam = 0>
  __device__ __forceinline__ void meet_team() const {
    if (threadIdx.x / Config::kTeamThreads == kTeam)
      barrier_sync<2 + kTeam, Config::kTeamThreads>();
    else if constexpr (kTeam + 1 < Config::kTeams)
      meet_team<kTeam + 1>();
  }
  __device__ __forceinline__ void meet() const { barrier_sync<1, Config::kConsumers>(); }

 private:
  TmaRing<Config> ring_;
  RingWalk<Config::kStages> at_;
  RingPosition<kUnitStages> unit_at_;
  int next_ = 0;  // the team that takes the next tile
};

}  // namespace decode
}  // namespace qf
