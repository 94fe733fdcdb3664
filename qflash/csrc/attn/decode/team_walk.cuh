// A team's path through the tiles of its block's share: every kTeams-th of them is its own, across the ends of units.
//
//   unit 0, tiles:  0 1 2 3 4 5   unit 1, tiles:  0 1 2   ..
//   of four teams:  0 1 2 3 0 1                   2 3 0
#pragma once

#include "attn/decode/share.cuh"

namespace qf {
namespace decode {

// Every lane has the current unit and advances from tile to tile by one addition. What is needed once per unit, the
// rest of the share, is in shared memory, because registers are full of outputs.
template <class Config>
class TeamWalk {
  static constexpr int kBlockN = Config::kBlockN;

 public:
  int b, kv_head, key0;  // of the next tile
  KeyRange seen;         // keys of its unit that some row sees

  // Collective for a warp. s_share: the warp's own.
  __device__ __forceinline__ TeamWalk(const QfAttnParams& p, const Share<Config>& share, int team,
                                      Share<Config>& s_share)
      : b(0), kv_head(0), key0(0), seen({0, 0}), end_(0) {
    enter(p, share, team, s_share);
  }
  __device__ __forceinline__ bool is_over() const { return key0 >= end_; }
  // Collective for a warp; the walk must not be over.
  __device__ __forceinline__ void advance(const QfAttnParams& p, Share<Config>& s_share) {
    key0 += Config::kTeams * kBlockN;
    if (key0 < end_) return;
    Share<Config> share = s_share;
    __syncwarp();  // all lanes have read it
    share.advance(p);
    enter(p, share, (key0 - end_) / kBlockN, s_share);
  }

 private:
  // skipped: tiles of other teams, from the beginning of the share's unit on.
  __device__ __forceinline__ void enter(const QfAttnParams& p, Share<Config> share, int skipped,
                                        Share<Config>& s_share) {
    key0 = end_ = 0;
    for (; !share.is_over(); share.advance(p)) {
      const Part part = share.part();
      const Seen<Config> of_unit(p, part.b);
      const int tiles = of_unit.tiles(part);
      if (skipped < tiles) {
        const int first = of_unit.first_key(part);
        b = part.b, kv_head = part.kv_head, seen = of_unit.any;
        key0 = first + skipped * kBlockN, end_ = first + tiles * kBlockN;
        break;
      }
      skipped -= tiles;
    }
    if (threadIdx.x % 32 == 0) s_share = share;
    __syncwarp();  // the share is in place
  }

  int end_;  // of the block's tiles of this unit
};

}  // namespace decode
}  // namespace qf
