// What the two Hopper kernels of the backward pass have in common. In each, kBlockM tokens stay with a block, with all
// that is summed over the others, and tiles of kBlockN tokens pass by:
//
//              rows (stay)   columns (pass by)    first product   second product   sums of a row
//   dK, dV     K, V          Q, dO                S^T = K Q^T     dP^T = V dO^T    dV += P^T dO, dK += dS^T Q
//   dQ         Q, dO         K, V                 S = Q K^T       dP = dO V^T      dQ += dS K
//   dQ         none          K, dS                none            none             dQ += dS K, where dS was stored
//
// "first" and "second" call the two operands of either side: K and V, or Q and dO. Rows of dK and dV meet the columns
// of all query heads that share their KV head, one head after another, so that sums over a group stay in registers.
//
// Shape says (kernels/attention_backward/sm90_bwd/config.h):
//
//   Element, kHeadDim         the type, and the largest head_dim served; the true one comes at run time
//   kKeysStay                 rows are keys: dK and dV; else rows are queries: dQ
//   kStoresDs                 where keys stay: dS may go to memory (attn/backward/ds_tiles.h)
//   kFromDs                   rows are queries, and dS comes from there: dQ = dS K alone
//   kSplits                   dK and dV are different consumers' sums
//   kConsumers                warpgroups that multiply
//   kPlain                    scores are scale * q . k, without a softcap
//   kBlockN, kStages          columns of a tile, and how many tiles are on their way
//   kProducerRegisters,       multiples of 8, together what the block was launched with
//   kConsumerRegisters
#pragma once

#include "attn/backward/ds_tiles.h"
#include "attn/wgmma/config.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Shape>
struct BackwardConfig : Shape {
  using typename Shape::Element;
  using Tensor = Tensor16<Element, 90>;
  using Shape::kBlockN, Shape::kHeadDim, Shape::kStages;
  using Shape::kConsumers;
  // kSplits: both consumers have the same 64 rows, and one sum each (consumer_split.cuh).
  static constexpr int kBlockM = (Shape::kSplits ? 1 : kConsumers) * kWarpgroupRows;
  // Tiles of columns begin at whole kBlockN of a sequence, as tiles of dS do.
  static constexpr bool kWholeTiles = Shape::kStoresDs || Shape::kFromDs;
  static_assert(!kWholeTiles || kBlockN == kDsTile, "a consumer and a tile of columns meet in one tile of dS");
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kInspectorThreads = 64;                         // of the producer's warpgroup (inspect.cuh)
  static constexpr int kWorkTiles = 2;                                 // described at a time: this one and the next
  static constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;  // blocks of 8 columns, of 8 channels
  static constexpr int kColumnSteps = kBlockN / 16, kChannelSteps = kHeadDim / 16;  // of wgmma, along a sum

  using RowTile = Panels<kBlockM, kHeadDim>;
  using ColumnTile = Panels<kBlockN, kHeadDim>;
  // First and second: of columns that meet dS, the second is a tile of dS for each consumer.
  static constexpr int kSecondBytes = Shape::kFromDs ? kConsumers * kDsTileBytes : ColumnTile::kBytes;
  static constexpr int kRowBytes = Shape::kFromDs ? 0 : 2 * RowTile::kBytes;
  static constexpr int kColumnBytes = ColumnTile::kBytes + kSecondBytes;

  // Weights of float16, and dS with them, are multiplied by 2^4 and sums divided by it at the end, both exactly: a
  // weight of a row of 16384 keys is float16's least normal number otherwise, and what is multiplied with it is smaller
  // still. dS has no bound, and keeps 2^12 before it overflows.
  static constexpr float kShift = kIsF16<Element> ? 4.0f : 0.0f, kUnshift = kIsF16<Element> ? 0x1p-4f : 1.0f;

  static constexpr int kStatisticsBytes = Shape::kKeysStay ? kStages * kBlockN * 8 : 0;
  static constexpr int kExchanges = 2, kExchangeBytes = Shape::kSplits ? kWarpgroupRows * kBlockN * 2 : 0;  // of P
  static constexpr int kScratchBytes = kConsumers * 4 * 2 * kHeadDim * 4;  // two rows of a warp (rotate_back.cuh)
  static constexpr int kBarrierBytes = 1024;                               // and descriptions of work tiles
  static constexpr int kSharedBytes = kRowBytes + kStages * kColumnBytes + kStatisticsBytes + kScratchBytes +
                                      kExchanges * kExchangeBytes + kBarrierBytes +
                                      kSwizzleBytes;  // the last: to align
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
