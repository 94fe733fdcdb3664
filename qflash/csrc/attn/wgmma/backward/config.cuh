// What the two Hopper kernels of the backward pass have in common. In each, kBlockM tokens stay with a block, with all
// that is summed over the others, and tiles of kBlockN tokens pass by:
//
//              rows (stay)   columns (pass by)    first product   second product   sums of a row
//   dK, dV     K, V          Q, dO                S^T = K Q^T     dP^T = V dO^T    dV += P^T dO, dK += dS^T Q
//   dQ         Q, dO         K, V                 S = Q K^T       dP = dO V^T      dQ += dS K
//
// "first" and "second" call the two operands of either side: K and V, or Q and dO. Rows of dK and dV meet the columns
// of all query heads that share their KV head, one head after another, so that sums over a group stay in registers.
//
// Shape says (kernels/attention_backward/sm90_bwd/config.h):
//
//   Element, kHeadDim         the type, and the largest head_dim served; the true one comes at run time
//   kKeysStay                 rows are keys: dK and dV; else rows are queries: dQ
//   kSplits                   dK and dV are different consumers' sums
//   kPlain                    scores are scale * q . k, without a softcap
//   kBlockN, kStages          columns of a tile, and how many tiles are on their way
//   kProducerRegisters,       multiples of 8, together what the block was launched with
//   kConsumerRegisters
#pragma once

#include "attn/wgmma/config.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Shape>
struct BackwardConfig : Shape {
  using typename Shape::Element;
  using Tensor = Tensor16<Element, 90>;
  using Shape::kBlockN, Shape::kHeadDim, Shape::kStages;
  // kSplits: both consumers have the same 64 rows, and one sum each (consumer_split.cuh).
  static constexpr int kConsumers = 2, kBlockM = (Shape::kSplits ? 1 : kConsumers) * kWarpgroupRows;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kInspectorThreads = 64;                         // of the producer's warpgroup (inspect.cuh)
  static constexpr int kWorkTiles = 2;                                 // described at a time: this one and the next
  static constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;  // blocks of 8 columns, of 8 channels
  static constexpr int kColumnSteps = kBlockN / 16, kChannelSteps = kHeadDim / 16;  // of wgmma, along a sum

  using RowTile = Panels<kBlockM, kHeadDim>;
  using ColumnTile = Panels<kBlockN, kHeadDim>;
  static constexpr int kRowBytes = 2 * RowTile::kBytes, kColumnBytes = 2 * ColumnTile::kBytes;  // first and second

  // Weights of float16 are multiplied by 2^8 and sums divided by it at the end, both exactly: a weight of a row of
  // 16384 keys is float16's least normal number otherwise, and what is multiplied with it is smaller still.
  static constexpr float kShift = kIsF16<Element> ? 8.0f : 0.0f, kUnshift = kIsF16<Element> ? 0x1p-8f : 1.0f;

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
