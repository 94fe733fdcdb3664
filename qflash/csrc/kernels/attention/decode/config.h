// Tile shapes of `decode`, by type, bucket of head dims, rows and architecture (compute capability times ten).
//
// A team has as many warps as there are blocks of 16 rows; up to 16 rows it is one warp. Every team copies its own
// tiles of keys, so there is one ring per team. The shared memory of an architecture determines how many teams there
// are, how many keys a tile has and how many tiles are in flight.
#pragma once

#include <type_traits>

#include "attn/decode/attend.cuh"
#include "smem/limits.h"

namespace qf {
namespace decode {

// kKind: QfKvKind.
template <class Element_, int kHeadDim_, int kRowWarps_, int kArch_, int kKind, bool kBatchInvariant_>
struct PortableConfig {
  static constexpr bool kBatchInvariant = kBatchInvariant_;
  using Element = Element_;
  static constexpr int kArch = kArch_;
  static constexpr bool kPaged = kKind == QF_KV_PAGES || kKind == QF_KV_PAGES_INT8;
  static constexpr bool kInt8 = kKind == QF_KV_PAGES_INT8, kKept = kKind == QF_KV_KEPT;
  static constexpr bool kInt8Queries = kInt8 || kKept;
  using Tensor = Tensor16<std::conditional_t<kInt8, F16, Element>, kArch>;  // for P V: a byte of V is a float16
  using QueryTensor = Tensor16<Element, kArch>;                             // for q's type
  using ScoreTensor = Tensor8<kArch>;                                       // for bytes
  static constexpr int kKeyBytes = kInt8Queries ? 1 : 2, kElementBytes = kInt8 ? 1 : 2;  // per element of K, of V
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kPairs = kChunks / 2;
  static constexpr int kByteChunks = kHeadDim / 16, kBytePairs = kHeadDim / 32;  // 16 and 32 channels of bytes
  static constexpr int kRowWarps = kRowWarps_, kRows = 16 * kRowWarps;
  static constexpr int kTeamWarps = kRowWarps, kTeamThreads = 32 * kTeamWarps, kKeyWarps = 1;
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  static constexpr bool kKeepsRemainders = kIsF16<Element> && !kInt8Queries;  // as in attn/decode/

  // Where registers are few: whether a thread's index is read afresh, and rows are finished when outputs are gone
  // (attend.cuh).
  static constexpr bool kFewRegisters = kHeadDim > 128 && (kKept || (kBatchInvariant && !kInt8));
  static constexpr bool kFinishesLater = kHeadDim > 128 && kBatchInvariant && !kInt8;

  // q: rows; if bytes, followed by one scale per row, then q . k_mean of each row.
  static constexpr int kQueryScales = kRows * kHeadDim, kQueryDots = kQueryScales + kRows * 4;
  static constexpr int kQueryBytes = kInt8Queries ? kQueryDots + kRows * 4 : kRows * kHeadDim * 2;
  // A dedicated warp describes units, and loads few rows of q one unit ahead. Teams of four leave no room for it: two
  // of them are eight warps, two per SM sub-partition, and a third would leave them 168 registers.
  static constexpr bool kUnitsWarp = kHeadDim > 128 || kRowWarps < 4, kQueriesAhead = kRowWarps == 1;
  static constexpr int kQueryPlaces = kQueriesAhead ? 2 : 1;

  // Where the warps of a block store their accumulators; a row's padding is as in attn/decode/config.cuh.
  static constexpr int kAreaColumns = kHeadDim == 128 && kArch >= 80 ? 128 : 64;
  static constexpr int kAreaStride = kAreaColumns + 8;  // floats
  static constexpr int area_bytes(int warps) { return warps * 8 * kAreaStride * 4; }
  static constexpr int stats_bytes(int warps) { return warps * 8 * 16; }

  // Tiles per team that fit for `teams` teams and `keys` keys per tile.
  static constexpr int kStateBytes = 1024;           // OwnState
  static constexpr int row_bytes(int element_bytes)  // in whole panels
  {
    return kHeadDim * element_bytes <= 64 ? 64 : (kHeadDim * element_bytes + 127) / 128 * 128;
  }
  static constexpr int stage_bytes(int keys) {
    return keys * (row_bytes(kKeyBytes) + row_bytes(kElementBytes) + (kInt8 ? 8 : 0));
  }
  static constexpr int stages(int teams, int keys) {
    const int warps = teams * kTeamWarps;
    const int other = kQueryPlaces * kQueryBytes + area_bytes(warps) + stats_bytes(warps) + kStateBytes;
    return (shared_limit(kArch) - other) / (teams * stage_bytes(keys));
  }
  // Up to eight warps, including the one that describes units; four and that one where the outputs of a row take more
  // registers. Fewer where a tile for each does not fit.
  static constexpr int kFewestKeys = 16;
  static constexpr int most_teams() {
    int teams = (kHeadDim > 128 ? 4 : kUnitsWarp ? 7 : 8) / kTeamWarps;
    while (teams > 1 && stages(teams, kFewestKeys) < 1) --teams;
    return teams;
  }
  static constexpr int kTeams = most_teams();
  // As many keys as make 8 KB of K and V up to head_dim 128, for every warp of a team: barriers of a team are then few.
  // Fewer where less than three tiles would be in flight.
  static constexpr int most_keys() {
    int keys = (kHeadDim <= 64 ? 32 : 16) * (kInt8 && kHeadDim <= 128 ? 2 : 1) * kTeamWarps;
    while (keys > kFewestKeys && stages(kTeams, keys) * kTeams < 3) keys /= 2;
    return keys;
  }
  static constexpr int kBlockN = most_keys(), kWarpKeys = kBlockN;
  static constexpr int kStages = stages(kTeams, kBlockN);
  static_assert(kStages >= 1, "the tiles do not fit the shared memory of this architecture");
  static constexpr int kMostStep = kHeadDim <= 128 ? 32 : 16;
  static constexpr int kStep = kBlockN < kMostStep ? kBlockN : kMostStep;  // keys per step
  using Tile = Panels<kBlockN, kHeadDim, kElementBytes>;
  using KeyTile = Panels<kBlockN, kHeadDim, kKeyBytes>;

  static constexpr int kWarps = kTeams * kTeamWarps, kConsumers = 32 * kWarps;
  static constexpr int kThreads = kConsumers + (kUnitsWarp ? 32 : 0);
  static constexpr int kAreaBytes = area_bytes(kWarps), kStatsBytes = stats_bytes(kWarps);
  static constexpr int kStageBytes = stage_bytes(kBlockN), kRingBytes = kTeams * kStages * kStageBytes;
  static_assert(kStageBytes == KeyTile::kBytes + Tile::kBytes + (kInt8 ? 8 * kBlockN : 0), "");
  static constexpr int kSharedBytes = kRingBytes + kQueryPlaces * kQueryBytes + kAreaBytes + kStatsBytes + kStateBytes;
  static_assert(kSharedBytes <= shared_limit(kArch), "");
};

}  // namespace decode
}  // namespace qf
