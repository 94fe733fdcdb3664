// One warp describes units to the teams that copy their own tiles, and loads the queries of each unit. That warp has
// nothing else to do, or it is the first of those that attend (kUnitsWarp).
#pragma once

#include "attn/decode/merge.cuh"
#include "attn/decode/queries.cuh"
#include "attn/decode/team_copy.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qf {
namespace decode {

// What that warp does; every function is collective for the warp.
template <class Config, class Memory>
class UnitWriter {
 public:
  __device__ __forceinline__ UnitWriter(const QfAttnParams& p, const Aligned& aligned, const Partials& partials,
                                        const Memory& memory)
      : p_(p), aligned_(aligned), partials_(partials), memory_(memory) {}

  __device__ __forceinline__ void start(const Runs& runs) const {
    const Share<Config> share(p_, runs);
    if (threadIdx.x % 32 == 0) memory_.state().share = share, memory_.state().ended = Part{};
    __syncwarp();              // the share is in place
    wait_for_previous_grid();  // it may have written q, and it may still read parts
  }
  // Describes the next unit, in a place that no warp reads. Up to 16 rows its queries are loaded, too.
  __device__ __forceinline__ void describe(int place) const {
    const Share<Config>& share = memory_.state().share;
    Unit<Config>& unit = memory_.state().units[place];
    const bool over = share.is_over();
    const Part part = over ? memory_.state().ended : share.part();
    describe_unit<Config>(p_, part, unit);
    if (over && threadIdx.x % 32 == 0) unit.tiles = -1;
    __syncwarp();  // the unit is described
    if constexpr (Config::kQueriesAhead)
      if (wants_queries<Config>(p_, unit))
        fetch_queries<Config>(p_, aligned_, part, memory_.queries(place), int(threadIdx.x % 32), 32);
    if (!over && !part.ends()) partials_.clear(part);  // before any warp stores, and before the merging block reads
  }
  // When the share is done, and before the last unit is merged.
  __device__ __forceinline__ void await(int place) const {
    const Unit<Config>& unit = memory_.state().units[place];
    if (unit.tiles < 0 && unit.part.parts > 0) partials_.await_announcements(unit.part);
  }
  // Once all warps have seen the last described unit: advances to the next. False: there is none.
  __device__ __forceinline__ bool advance(int place) const {
    const Unit<Config>& unit = memory_.state().units[place];
    if (unit.tiles < 0) return false;
    const Part& part = unit.part;
    if (!part.ends()) partials_.announce(part);
    if (threadIdx.x % 32 == 0) {
      if (part.ends() && !part.is_whole()) memory_.state().ended = part;
      memory_.state().share.advance(p_);
    }
    __syncwarp();  // the share is in place
    return true;
  }
  // Describes all units of the block, one ahead of the teams, in two places in turn. All warps of the block synchronize
  // once per unit: it is described, and no warp reads the previous unit any more.
  __device__ __forceinline__ void describe_all(const Runs& runs) const {
    start(runs);
    for (int place = 0;; place ^= 1) {
      describe(place);
      await(place);
      __syncthreads();
      if (!advance(place)) return;
    }
  }

 private:
  const QfAttnParams& p_;
  const Aligned& aligned_;
  const Partials& partials_;
  Memory memory_;
};

}  // namespace decode
}  // namespace qf
