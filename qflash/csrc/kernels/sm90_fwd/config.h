// Tile shapes of `sm90_fwd`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the true head_dim comes at run
// time) and -DQF_DTYPE (QF_F16 or QF_BF16).
#pragma once

#include "attn/elements.cuh"
#include "attn/mma/product.cuh"
#include "hopper/descriptor.cuh"
#include "smem/limits.h"

namespace qf {
namespace sm90_fwd {

constexpr int kHeadDim = QF_HEAD_DIM < 64 ? 64 : QF_HEAD_DIM;
using Element = ElementOf<QF_DTYPE>::Type;
using Tensor = Tensor16<Element, 90>;
constexpr bool kKeepsRemainders = QF_DTYPE == QF_F16;  // of weights, in rows that see few keys

#ifndef QF_CONSUMERS
#define QF_CONSUMERS (kHeadDim == 64 ? 3 : 2)
#endif
#ifndef QF_BLOCK_N
// float16's remainders of weights need registers, which head_dim 64 has none of to spare.
#define QF_BLOCK_N (kHeadDim == 64 && kKeepsRemainders ? 112 : kHeadDim <= 128 ? 128 : kHeadDim == 192 ? 96 : 80)
#endif
#ifndef QF_STAGES
#define QF_STAGES 2
#endif

// A consumer is a warpgroup with 64 rows of its own.
constexpr int kConsumers = QF_CONSUMERS;
constexpr int kGroupThreads = 128, kGroupRows = 64;
constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kBlockM = kConsumers * kGroupRows;
constexpr int kBlockN = QF_BLOCK_N;
constexpr int kStages = QF_STAGES;
#ifndef QF_Q_STAGES
#define QF_Q_STAGES (kHeadDim <= 128 ? 2 : 1)
#endif
constexpr int kQStages = QF_Q_STAGES;  // 2: the next item's q is there before this one is done
constexpr int kRecords = 4;            // of items, planned ahead

// Registers of a thread: a multiple of 8 each, and together what the block was launched with.
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40, kConsumerRegisters = kConsumers == 3 ? 160 : 232;

using QTile = Panels<kBlockM, kHeadDim>;
using KVTile = Panels<kBlockN, kHeadDim>;
constexpr int kNTiles = kBlockN / 8, kOTiles = kHeadDim / 8;

constexpr int kTilesBytes = kQStages * QTile::kBytes + 2 * kStages * KVTile::kBytes;
constexpr int kBarrierBytes = 1024 /* and records of items */;
constexpr int kSharedBytes = kTilesBytes + kBarrierBytes + kSwizzleBytes;  // the last for alignment
static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit shared memory");

}  // namespace sm90_fwd
}  // namespace qf
