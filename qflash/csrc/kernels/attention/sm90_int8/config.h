// Tile shapes of `sm90_int8`, from -DQF_HEAD_DIM (a bucket: 64, 128 or 256; the true head_dim comes
// at run time), -DQF_DTYPE (QF_F16 or QF_BF16: out's, and V's where that stays as it is) and -DQF_PRECISION (QF_INT8 or
// QF_INT8_FP8: what weights and V are multiplied in).
#pragma once

#include "attn/mma/product.cuh"
#include "common/elements.cuh"
#include "hopper/descriptor.cuh"
#include "smem/limits.h"

namespace qf {
namespace sm90 {

constexpr int kHeadDim = QF_HEAD_DIM;
static_assert(QF_PRECISION == QF_INT8 || QF_PRECISION == QF_INT8_FP8, "a precision with INT8 scores");
constexpr bool kFp8 = QF_PRECISION == QF_INT8_FP8;
using Element = ElementOf<QF_DTYPE>::Type;
using Tensor = Tensor16<Element, 90>;

// A consumer is a warpgroup with 64 rows of its own.
constexpr int kConsumers = 2;
constexpr int kGroupThreads = 128, kGroupRows = 64;
constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kBlockM = kConsumers * kGroupRows;
constexpr int kBlockN = kHeadDim > 128 ? 64 : 128;
constexpr int kKeysFrom = kBlockN;  // tiles begin where groups of scales and V's order of keys do
constexpr int kStages = kFp8 && kHeadDim <= 128 ? 4 : 2;
constexpr int kQStages = kFp8 && kHeadDim > 128 ? 1 : 2;
constexpr int kRecords = 2;
constexpr bool kSkipsTiles = kBlockN < kBlockM;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Keys that share a scale; a tile has kParts such groups. V's tiles share a lift (attn/sm90_quantize).
constexpr int kKeyGroup = 64, kParts = kBlockN / kKeyGroup, kLiftKeys = 128;

// What a record says of an item to this kernel alone. Of the pass before, see attn/sm90_quantize.
struct KernelFacts {
  int64_t head;                   // of K and V, among those of all sequences
  int64_t row;                    // the item's first, among those of all heads
  int64_t k_scale_at, v_lift_at;  // of the head's first key
};

using QTile = Panels<kBlockM, kHeadDim, 1>;
using KTile = Panels<kBlockN, kHeadDim, 1>;
template <bool kTransposed>
struct VTiles {
  using Tile = Panels<kBlockN, kHeadDim>;
};
template <>
struct VTiles<true> {
  using Tile = Panels<kHeadDim, kBlockN, 1, kBlockN % 128 == 0 ? 128 : 64>;
};
constexpr bool kVTransposed = kFp8;
using VTile = VTiles<kVTransposed>::Tile;
constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;

constexpr int kTilesBytes = kQStages * QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);
constexpr int kBarrierBytes = 1024;  // and records of items
// Outputs in float32, where those of 8-bit floats go before they lose too many bits, and 16-bit ones on their way out.
constexpr int kAsideBytes = kBlockM * kHeadDim * (kFp8 ? 4 : 2);
// Ones, in E4M3, which weights are multiplied by to be added up: two columns for every 32 keys, zeros elsewhere.
using OnesTile = Panels<8, 128, 1>;
constexpr int kOnesBytes = kFp8 ? OnesTile::kBytes : 0;
constexpr int kSharedBytes =
    kTilesBytes + kBarrierBytes + kAsideBytes + kOnesBytes + kSwizzleBytes;  // the last: to align
static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");

}  // namespace sm90
}  // namespace qf
