// Tile shapes of the decode kernels: few query rows against a long cache.
//
// The rows of one KV head, Tq tokens of `group` heads each, are packed: row = token * group + head of the group. Four
// or eight warps form teams, which take tiles of keys in turn. Up to 16 rows, every warp of a team takes all rows and
// 32 (16) of the tile's keys (kRowWarps = 1), so that warps synchronize only at the end; up to 32 and 64 rows, two and
// four warps of a team share the rows.
#pragma once

#include "attn/mma/product.cuh"
#include "common/elements.cuh"
#include "hopper/descriptor.cuh"

namespace qf {
namespace decode {

constexpr int kMostRows = 64;

// What is aligned to 16 bytes, and so may be read or written in vectors: rows of tensors, and the tables of rope.
struct Aligned {
  bool q, k, v, out, rope;
};

template <class Element_, int kHeadDim_, int kRowWarps_, int kArch, bool kPaged_ = false, int kKeyBytes = 2>
struct Config {
  using Element = Element_;
  using Tensor = Tensor16<Element, kArch>;
  using QueryTensor = Tensor;                  // for q's type
  static constexpr bool kPaged = kPaged_;      // K and V are in the pages of a cache
  static constexpr bool kInt8 = false;         // K and V in bytes (int8_config.cuh)
  static constexpr bool kKept = false;         // K in bytes, V in 16 bits: KV from quantize_kv (kept_config.cuh)
  static constexpr bool kInt8Queries = false;  // q is multiplied as bytes, like K
  static constexpr int kScaleBytes = 0;        // of a tile of K, and of V
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kPairs = kChunks / 2;
  // Keys of a tile: K and V take 32 KB for any element size. The work of the warp that issues the loads depends only on
  // the number of tiles.
  static constexpr int kBlockN = kHeadDim <= 64 ? 256 / kKeyBytes : kHeadDim <= 128 ? 128 / kKeyBytes : 64;
  static constexpr int kWarps = kHeadDim <= 128 ? 8 : 4, kConsumers = 32 * kWarps;  // warps that attend
  static constexpr int kRowWarps = kRowWarps_, kRows = 16 * kRowWarps;
  static constexpr int kFewestWarps = kBlockN / (kHeadDim <= 128 ? 32 : 16);
  static constexpr int kTeamWarps = kRowWarps > kFewestWarps ? kRowWarps : kFewestWarps;
  static constexpr int kKeyWarps = kTeamWarps / kRowWarps;
  static constexpr int kTeams = kWarps / kTeamWarps, kTeamThreads = 32 * kTeamWarps;
  static constexpr int kWarpKeys = kBlockN / kKeyWarps;    // per warp
  static constexpr int kStep = kHeadDim <= 128 ? 32 : 16;  // keys per step
  using Tile = Panels<kBlockN, kHeadDim>;
  using KeyTile = Tile;  // where K has the layout of V
  static constexpr bool kQueriesInRegisters = kHeadDim <= 128;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;

  // Weights are rounded for the MMA with V. float16 promises 1e-3, so where some row sees few keys, the remainders are
  // multiplied too; bfloat16 rounds its outputs far more coarsely than that.
  static constexpr bool kKeepsRemainders = kIsF16<Element>;

  // Where the warps of a block store their accumulators, 8 rows and kAreaColumns channels at a time, with rows padded
  // so that the eight rows a warp writes at a column fall into four different groups of banks.
  static constexpr int kAreaColumns = kHeadDim <= 128 ? kHeadDim : 64, kAreaStride = kAreaColumns + 8;  // floats
  static constexpr int kAreaBytes = kWarps * 8 * kAreaStride * 4;
  static constexpr int kStatsBytes = kWarps * 8 * 16;
};

}  // namespace decode
}  // namespace qf
