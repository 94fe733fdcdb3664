// Tile shapes of `sm90_fwd`, from -DQF_HEAD_DIM (a bucket: 64, 96, 128, 192 or 256; the true head_dim comes at run
// time) and -DQF_DTYPE (QF_F16 or QF_BF16).
#pragma once

#include "attn/mma/product.cuh"
#include "common/elements.cuh"
#include "hopper/descriptor.cuh"
#include "smem/limits.h"

namespace qf {
namespace sm90 {

constexpr int kHeadDim = QF_HEAD_DIM;
using Element = ElementOf<QF_DTYPE>::Type;
using Tensor = Tensor16<Element, 90>;
constexpr bool kKeepsRemainders = QF_DTYPE == QF_F16;  // of weights, in rows that see few keys

// A consumer is a warpgroup with 64 rows of its own.
constexpr int kConsumers = kHeadDim == 64 ? 3 : 2;
constexpr int kGroupThreads = 128, kGroupRows = 64;
constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kBlockM = kConsumers * kGroupRows;
// float16's remainders of weights need registers, which head_dim 64 has none of to spare.
constexpr int kBlockN = kHeadDim > 192 ? 64 : kHeadDim > 128 ? 96 : kHeadDim == 64 && kKeepsRemainders ? 112 : 128;
constexpr int kKeysFrom = 1;  // tiles of keys begin at any
constexpr int kStages = 2;
constexpr int kQStages = kHeadDim <= 128 ? 2 : 1;  // 2: the next item's q is there before this one is done,
constexpr bool kOutThroughQ = kQStages > 1;        // and this one's makes room for its outputs
constexpr int kRecords = 2;                        // of items: this one and the next
// Masks that end a row's keys early leave some of the last tiles to the block's last rows alone: consumers skip those.
constexpr bool kSkipsTiles = kBlockN < kBlockM;

// Registers of a thread: a multiple of 8 each, and together what the block was launched with.
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;

struct KernelFacts {};  // nothing beside what every record says of an item

using QTile = Panels<kBlockM, kHeadDim>;
using KTile = Panels<kBlockN, kHeadDim>;
using VTile = KTile;
constexpr bool kVTransposed = false;
constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;

constexpr int kTilesBytes = kQStages * QTile::kBytes + kStages * (KTile::kBytes + VTile::kBytes);
constexpr int kBarrierBytes = 1024;  // and records of items
// Where outputs step aside while scores are computed again, where registers do not suffice for both.
constexpr int kAsideBytes = kConsumers == 3 ? kConsumers * kGroupThreads * kOTiles * 16 : 0;
constexpr int kSharedBytes = kTilesBytes + kBarrierBytes + kAsideBytes + kSwizzleBytes;  // the last for alignment
static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");

}  // namespace sm90
}  // namespace qf
