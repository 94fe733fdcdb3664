// Tile shapes of `sm90_int8`.
#pragma once

#include "attn/wgmma/config.cuh"
#include "attn/wgmma/scores_int8.cuh"
#include "common/element_types.h"

namespace qf {
namespace sm90_int8 {

// kHeadDim: a bucket (64, 128 or 256); the actual head_dim is a run-time argument. kFp8: weights and V are multiplied
// in E4M3, else in Element.
template <class Element_, int kHeadDim_, bool kFp8_>
struct Shape {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kFp8 = kFp8_;

  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kBlockN = kHeadDim > 128 ? 64 : 128;
  static constexpr int kFirstKey = kBlockN;  // tiles begin where groups of scales and V's order of keys do
  static constexpr int kStages = kFp8 && kHeadDim <= 128 ? 4 : 2;
  static constexpr int kQStages = kFp8 && kHeadDim > 128 ? 1 : 2;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // Steady tiles have a loop of their own; but not if half a tile's exponentials take less time than the MMA of the
  // previous tile.
  static constexpr bool kSteadyTiles = kFp8 || kHeadDim <= 128;

  // Keys whose values in E4M3 share an exponent (quant/sm90/values.cuh); a work tile's are counted from here.
  static constexpr int kExponentKeys = 128;
  __host__ __device__ static constexpr int exponents_from(int key) { return key / kExponentKeys * kExponentKeys; }
  static constexpr int kPromotedTiles = 1024 / kBlockN;  // whose MMAs the tensor cores accumulate accurately enough

  using QTile = Panels<kBlockM, kHeadDim, 1>;
  using KTile = Panels<kBlockN, kHeadDim, 1>;
  static constexpr bool kPaged = false;
  static constexpr bool kVTransposed = kFp8;
  template <bool kTransposed, class = void>
  struct VTiles {
    using Tile = Panels<kBlockN, kHeadDim>;
  };
  template <class Unused>
  struct VTiles<true, Unused> {
    using Tile = Panels<kHeadDim, kBlockN, 1, kBlockN % 128 == 0 ? 128 : 64>;
  };
  using VTile = typename VTiles<kVTransposed>::Tile;

  // Outputs: in float32, promoted from E4M3 MMAs, and in 16 bits, staged for the store.
  static constexpr int kOutputBytes = kBlockM * kHeadDim * (kFp8 ? 4 : 2);
  // Ones: the MMA with them sums weights in E4M3 (attn/wgmma/weights_e4m3.cuh).
  using OnesTile = Panels<8, 128, 1>;
  static constexpr int kScratchBytes = kOutputBytes + (kFp8 ? OnesTile::kBytes : 0);
  using Facts = wgmma::Int8Facts;
};

}  // namespace sm90_int8
}  // namespace qf
