// Tiles of K and V that every team copies for itself, into its own ring. Up to 16 rows a team is one warp, which waits
// for no other warp before the end of a unit.
//
//   team 0: tiles 0, 4, 8, ..   team 1: tiles 1, 5, 9, ..   (four teams)
//
// Copies run kStages tiles ahead, across the ends of units, so that memory stays busy while partial results are merged
// and the next unit begins.
#pragma once

#include "attn/decode/attend.cuh"
#include "attn/decode/kept_copy.cuh"
#include "attn/decode/own_units.cuh"
#include "attn/decode/team_copy.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qf {
namespace decode {

template <class Config>
struct OwnState {
  Share<Config> share;                   // from the last described unit on
  Part ended;                            // of the unit that this block ends and did not begin, if there is one
  Unit<Config> units[2];                 // used alternately
  Share<Config> shares[Config::kWarps];  // what each warp has left to copy
};

// Shared memory of a block. Panels may begin anywhere: neither TMA nor wgmma accesses them.
template <class Config>
struct OwnMemory {
  char* s_first;

  __device__ __forceinline__ char* tiles(int team, int stage) const {  // K and V, then their scales
    return s_first + (team * Config::kStages + stage) * Config::kStageBytes;
  }
  __device__ __forceinline__ char* queries(int place) const {
    return s_first + Config::kRingBytes + (Config::kQueriesAhead ? place * Config::kQueryBytes : 0);
  }
  __device__ __forceinline__ char* area() const {
    return s_first + Config::kRingBytes + Config::kQueryPlaces * Config::kQueryBytes;
  }
  __device__ __forceinline__ OwnState<Config>& state() const {
    static_assert(sizeof(OwnState<Config>) <= Config::kStateBytes, "");
    return *reinterpret_cast<OwnState<Config>*>(area() + Area<Config>::kBytes);
  }
};

// A Source (attend.cuh).
template <class Config, bool kAsync>
class OwnTiles {
  using Tile = typename Config::Tile;
  using Copy = std::conditional_t<Config::kKept, KeptCopy<Config, kAsync>, TeamCopy<Config, kAsync>>;

 public:
  // Collective for the consumers: issues the copies of the first tiles.
  __device__ __forceinline__ OwnTiles(const QfAttnParams& p, const Runs& runs, const Aligned& aligned,
                                      const Partials& partials, const OwnMemory<Config>& memory)
      : p_(p),
        aligned_(aligned),
        memory_(memory),
        writer_(p, aligned, partials, memory),
        walk_(p, Share<Config>(p, runs), team(), memory.state().shares[threadIdx.x / 32]),
        copy_(p, aligned) {
    wait_for_previous_grid();  // it may have written q, K or V
    if (!walk_.is_over()) copy_.look_up(walk_);
#pragma unroll 1
    for (int stage = 0; stage < Config::kStages; ++stage) fetch(stage);
    if (!Config::kUnitsWarp && threadIdx.x < 32) {
      writer_.start(runs);
      writer_.describe(0);
    }
  }

  __device__ __forceinline__ int next_team() const { return next_; }
  __device__ __forceinline__ bool is_mine() const { return next_ == team(); }
  __device__ __forceinline__ void skip() {
    if (++next_ == Config::kTeams) next_ = 0;
  }
  __device__ __forceinline__ const char* wait_k() const {
    if constexpr (kAsync) cp_async_wait<Config::kStages - 1>();
    meet_team();  // all of the tile is there
    return stage();
  }
  __device__ __forceinline__ char* wait_v() const { return stage() + Config::KeyTile::kBytes; }  // loaded with K
  // Scales of the tile's keys, where K and V are bytes.
  __device__ __forceinline__ const float* k_scales() const {
    return reinterpret_cast<const float*>(stage() + 2 * Tile::kBytes);
  }
  __device__ __forceinline__ const float* v_scales() const { return k_scales() + Config::kBlockN; }
  __device__ __forceinline__ void written() const {}
  __device__ __forceinline__ void release() {
    meet_team();  // all have read
    fetch(stage_);
    if (++stage_ == Config::kStages) stage_ = 0;
    skip();
  }
  // Collective for the consumers, after they are done with the previous unit.
  __device__ __forceinline__ const Unit<Config>& wait_unit() const {
    const bool describes = !Config::kUnitsWarp && threadIdx.x < 32;
    if (describes) writer_.await(unit_);
    __syncthreads();  // the unit is described
    const Unit<Config>& unit = memory_.state().units[unit_];
    if constexpr (!Config::kQueriesAhead) {
      if (wants_queries<Config>(p_, unit))
        fetch_queries<Config>(p_, aligned_, unit.part, memory_.queries(0), fresh_tid(), Config::kConsumers);
      meet();  // q is in place
    }
    if (describes && writer_.advance(unit_)) writer_.describe(unit_ ^ 1);
    return unit;
  }
  __device__ __forceinline__ const char* queries() const { return memory_.queries(unit_); }
  __device__ __forceinline__ void release_unit() { unit_ ^= 1; }
  template <int kTeam = 0>
  __device__ __forceinline__ void meet_team() const {
    if constexpr (Config::kTeamWarps == 1)
      __syncwarp();
    else if (Config::kTeams == 1 || team() == kTeam)
      barrier_sync<2 + kTeam, Config::kTeamThreads>();
    else if constexpr (kTeam + 1 < Config::kTeams)
      meet_team<kTeam + 1>();
  }
  __device__ __forceinline__ void meet() const { barrier_sync<1, Config::kConsumers>(); }

 private:
  // Where the outputs of a row leave few registers, the thread's index is read afresh.
  __device__ static __forceinline__ int team() {
    return (Config::kHeadDim > 128 ? fresh_tid() : int(threadIdx.x)) / Config::kTeamThreads;
  }
  __device__ __forceinline__ Share<Config>& own_share() const { return memory_.state().shares[fresh_tid() / 32]; }
  __device__ __forceinline__ char* stage() const { return memory_.tiles(team(), stage_); }

  // Loads the team's next tile, if there is one, into a stage that no thread reads any more.
  __device__ __forceinline__ void fetch(int stage) {
    if (walk_.is_over()) {
      let_next_grid_start();
    } else {
      copy_.copy(walk_, memory_.tiles(team(), stage));
      walk_.advance(p_, own_share());
      if (!walk_.is_over()) copy_.look_up(walk_);
    }
    if constexpr (kAsync) cp_async_commit();  // one group per tile, so that they can be counted
  }

  const QfAttnParams& p_;
  const Aligned& aligned_;
  OwnMemory<Config> memory_;
  UnitWriter<Config, OwnMemory<Config>> writer_;
  TeamWalk<Config> walk_;
  Copy copy_;
  int next_ = 0;   // the team that takes the next tile
  int stage_ = 0;  // of this team's next tile
  int unit_ = 0;   // of OwnState::units
};

}  // namespace decode
}  // namespace qf
