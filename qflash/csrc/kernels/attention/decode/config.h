// Tile shapes of `decode`, by type, bucket of head dims, rows and architecture (compute capability times ten).
//
// A team is as many warps as there are blocks of 16 rows; up to 16 rows it is one warp. Every team copies its own tiles
// of keys, so the ring is cut into one for each team. What shared memory an architecture has decides how many teams
// there are, how many keys a tile has and how many tiles are under way.
#pragma once

#include "attn/decode/attend.cuh"
#include "smem/limits.h"

namespace qf {
namespace decode {

template <class Element_, int kHeadDim_, int kRowWarps_, int kArch_, bool kPaged_>
struct PortableConfig {
  using Element = Element_;
  using Tensor = Tensor16<Element, kArch_>;
  static constexpr int kArch = kArch_;
  static constexpr bool kPaged = kPaged_, kInt8 = false;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kPairs = kChunks / 2;
  static constexpr int kRowWarps = kRowWarps_, kRows = 16 * kRowWarps;
  static constexpr int kTeamWarps = kRowWarps, kTeamThreads = 32 * kTeamWarps, kKeyWarps = 1;
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr bool kKeepsRemainders = kIsF16<Element>;  // as attn/decode/config.cuh says

  // Where the warps of a block put their sums; a row's padding is as in attn/decode/config.cuh.
  static constexpr int kAreaColumns = 64, kAreaStride = kAreaColumns + 8;  // floats
  static constexpr int area_bytes(int warps) { return warps * 8 * kAreaStride * 4; }
  static constexpr int stats_bytes(int warps) { return warps * 8 * 16; }

  // Tiles that `teams` teams have room for, each, with `keys` keys.
  static constexpr int kStateBytes = 1536;  // OwnState
  static constexpr int stages(int teams, int keys) {
    const int warps = teams * kTeamWarps;
    const int other = kQueryBytes + area_bytes(warps) + stats_bytes(warps) + kStateBytes;
    return (shared_limit(kArch) - other) / (teams * 2 * keys * kHeadDim * 2);
  }
  // Eight warps, four where the outputs of a row take more registers; fewer where a tile for each is too much.
  static constexpr int kFewestKeys = 16;
  static constexpr int most_teams() {
    int teams = (kHeadDim <= 128 ? 8 : 4) / kTeamWarps;
    while (teams > 1 && stages(teams, kFewestKeys) < 1) teams /= 2;
    return teams;
  }
  static constexpr int kTeams = most_teams();
  // As many keys as a warp copies with 8 KB of K and V at head_dim 128, for every warp of a team: barriers of a team
  // are then few. Fewer where less than three tiles would be under way.
  static constexpr int most_keys() {
    int keys = (kHeadDim <= 64 ? 32 : 16) * kTeamWarps;
    while (keys > kFewestKeys && stages(kTeams, keys) * kTeams < 3) keys /= 2;
    return keys;
  }
  static constexpr int kBlockN = most_keys(), kWarpKeys = kBlockN;
  static constexpr int kStages = stages(kTeams, kBlockN);
  static_assert(kStages >= 1, "the tiles do not fit the shared memory of this architecture");
  static constexpr int kMostStep = kHeadDim <= 128 ? 32 : 16;
  static constexpr int kStep = kBlockN < kMostStep ? kBlockN : kMostStep;  // keys at once
  using Tile = Panels<kBlockN, kHeadDim>;

  static constexpr int kWarps = kTeams * kTeamWarps, kConsumers = 32 * kWarps;
  static constexpr int kAreaBytes = area_bytes(kWarps), kStatsBytes = stats_bytes(kWarps);
  static constexpr int kStageBytes = 2 * Tile::kBytes, kRingBytes = kTeams * kStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes + kQueryBytes + kAreaBytes + kStatsBytes + kStateBytes;
  static_assert(kSharedBytes <= shared_limit(kArch), "");
};

}  // namespace decode
}  // namespace qf
