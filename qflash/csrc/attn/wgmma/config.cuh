// What follows from the tile shape that a kernel of this tier has chosen: TileConfig<Shape>. Two shapes may be used in
// one translation unit: everything here depends on its template arguments only.
//
// Shape specifies (kernels/attention/sm90_fwd/config.h is the simplest):
//
//   Element                   type of v (if it stays 16-bit) and out
//   kHeadDim                  the largest head_dim served; the actual one is a run-time argument
//   kConsumers, kBlockM       consumer warpgroups, 64 rows each, and their rows in total
//   kBlockN                   keys of a tile
//   kFirstKey                 tiles of keys begin at multiples of this
//   kStages, kQStages         of K and V, and of q; with two of q the next work tile's q is loaded early
//   QTile, KTile, VTile       layouts in shared memory (hopper/descriptor.cuh)
//   kPaged                    K and V are pages of a cache; tiles begin where boxes of pages may
//   kVTransposed              V is stored as [channel][key]
//   kProducerRegisters,       multiples of 8, together what the block was launched with
//   kConsumerRegisters
//   kScratchBytes             of shared memory, for the kernel's own use
//   Facts                     what a work tile tells this kernel only
#pragma once

#include "attn/mma/product.cuh"
#include "hopper/descriptor.cuh"
#include "smem/limits.h"

namespace qf {
namespace wgmma {

constexpr int kWarpgroupThreads = 128, kWarpgroupRows = 64;

template <class Shape>
struct TileConfig : Shape {
  using Tensor = Tensor16<typename Shape::Element, 90>;
  using Shape::kBlockM, Shape::kBlockN, Shape::kConsumers, Shape::kHeadDim, Shape::kQStages, Shape::kStages;
  using typename Shape::KTile, typename Shape::QTile, typename Shape::VTile;
  static_assert(kBlockM == kConsumers * kWarpgroupRows, "each consumer has 64 rows");

  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kInspectorThreads = 64;                         // of the producer's warpgroup (nonfinite.cuh)
  static constexpr int kWorkTiles = 2;                                 // described at a time: this one and the next
  static constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;  // blocks of 8 keys, of 8 channels
  // Masks that end a row's keys early leave some of the last tiles to the block's last rows alone: the other consumers
  // skip those tiles.
  static constexpr bool kSkipsTiles = kBlockN < kBlockM;

  static constexpr int kTilesBytes = kQStages * QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);
  static constexpr int kBarrierBytes = 1024;  // including the descriptions of work tiles
  static constexpr int kSharedBytes =
      kTilesBytes + kBarrierBytes + Shape::kScratchBytes + kSwizzleBytes;  // the last term: for alignment
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");
};

}  // namespace wgmma
}  // namespace qf
