// What the two Hopper kernels of the backward pass share. In each, kBlockM tokens (rows) are stationary in a block,
// together with the gradients accumulated for them, and tiles of kBlockN tokens (columns) are streamed:
//
//              rows (stationary)   columns (streamed)   first MMA     second MMA      accumulators of a row
//   dK, dV     K, V                Q, dO                S^T = K Q^T   dP^T = V dO^T   dV += P^T dO, dK += dS^T Q
//   dQ         Q, dO               K, V                 S = Q K^T     dP = dO V^T     dQ += dS K
//   dQ         none                K, dS                none          none            dQ += dS K, from stored dS
//
// "first" and "second" name the two operands of either side: K and V, or Q and dO. For dK and dV the columns of all
// query heads that share the KV head are streamed in sequence, so that the accumulators of a group stay in registers.
//
// Shape specifies (kernels/attention_backward/sm90_bwd/config.h):
//
//   Element, kHeadDim         the type, and the largest head_dim served; the actual one is a run-time argument
//   kKeysStay                 rows are keys: dK and dV; else rows are queries: dQ
//   kStoresDs                 if keys are stationary: dS may be written to memory (attn/backward/ds_tiles.h)
//   kFromDs                   rows are queries, and dS is read from there: only dQ = dS K
//   kSplits                   dK and dV are accumulated by different consumers
//   kConsumers                warpgroups that issue MMAs
//   kPlain                    scores are scale * q . k with scale > 0, without a softcap
//   kBlockN, kStages          columns of a tile, and the number of tiles in flight
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
  // kSplits: both consumers have the same 64 rows, and one gradient each (consumer_split.cuh).
  static constexpr int kBlockM = (Shape::kSplits ? 1 : kConsumers) * kWarpgroupRows;
  // Tiles of columns begin at multiples of kBlockN in a sequence, as tiles of dS do.
  static constexpr bool kWholeTiles = Shape::kStoresDs || Shape::kFromDs;
  static_assert(!kWholeTiles || kBlockN == kDsTile, "a consumer and a tile of columns meet in one tile of dS");
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kInspectorThreads = 64;                         // of the producer's warpgroup (inspect.cuh)
  static constexpr int kWorkTiles = 2;                                 // described at a time: this one and the next
  static constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;  // blocks of 8 columns, of 8 channels
  static constexpr int kColumnSteps = kBlockN / 16, kChannelSteps = kHeadDim / 16;  // wgmma steps along k

  using RowTile = Panels<kBlockM, kHeadDim>;
  using ColumnTile = Panels<kBlockN, kHeadDim>;
  // First and second operand: if the columns are paired with dS, the second is one tile of dS per consumer.
  static constexpr int kSecondBytes = Shape::kFromDs ? kConsumers * kDsTileBytes : ColumnTile::kBytes;
  static constexpr int kRowBytes = Shape::kFromDs ? 0 : 2 * RowTile::kBytes;
  static constexpr int kColumnBytes = ColumnTile::kBytes + kSecondBytes;

  // In float16, weights and dS are scaled by 2^4 and the accumulators by 2^-4 in the epilogue, both exactly: otherwise
  // a weight of a row of 16384 keys would be float16's smallest normal number, and its product with dP smaller still.
  // dS is unbounded, and overflows only from 2^12 on.
  static constexpr float kShift = kIsF16<Element> ? 4.0f : 0.0f, kUnshift = kIsF16<Element> ? 0x1p-4f : 1.0f;

  static constexpr int kStatisticsBytes = Shape::kKeysStay ? kStages * kBlockN * 8 : 0;
  static constexpr int kExchanges = 2, kExchangeBytes = Shape::kSplits ? kWarpgroupRows * kBlockN * 2 : 0;  // of P
  static constexpr int kScratchBytes = kConsumers * 4 * 2 * kHeadDim * 4;  // two rows per warp (rotate_back.cuh)
  static constexpr int kBarrierBytes = 1024;                               // including the descriptions of work tiles
  static constexpr int kSharedBytes = kRowBytes + kStages * kColumnBytes + kStatisticsBytes + kScratchBytes +
                                      kExchanges * kExchangeBytes + kBarrierBytes +
                                      kSwizzleBytes;  // the last term: for alignment
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
