// Tile shapes of `fa_mma`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the actual head_dim is known at
// run time), -DQF_DTYPE (QF_F16 or QF_BF16), -DQF_ARCH (compute capability times ten) and -DQF_KV_KIND (QF_KV_ARRAYS or
// QF_KV_PAGES).
#pragma once

#include "attn/mma/product.cuh"
#include "common/elements.cuh"
#include "smem/limits.h"

namespace qf {
namespace fa_mma {

constexpr int kHeadDim = QF_HEAD_DIM;
constexpr int kArch = QF_ARCH;
using Element = ElementOf<QF_DTYPE>::Type;
using Tensor = Tensor16<Element, kArch>;
constexpr bool kPaged = QF_KV_KIND == QF_KV_PAGES;  // K and V are pages; those of INT8 are dequantized before

constexpr int kSharedLimit = shared_limit(kArch);
constexpr bool kScarce = kSharedLimit <= 64 * 1024;   // Turing
constexpr bool kModest = kSharedLimit <= 100 * 1024;  // and the small Amperes and Adas
constexpr bool kAmple = kSharedLimit > 200 * 1024;    // Hopper

// Rows of a warp in blocks of 16. Two halve the reads of K and V from shared memory, which would be the bottleneck with
// one; from head_dim 192 on the registers hold the outputs of only one.
constexpr int kMTiles = kHeadDim > 128 || kScarce || (kModest && kHeadDim > 96) ? 1 : 2;
constexpr int kWarps = kHeadDim > 128 && !kModest ? 8 : kHeadDim > 192 && kScarce ? 2 : 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 16 * kMTiles;
constexpr int kBlockM = kWarps * kWarpRows;
constexpr int kBlockN = (kHeadDim >= 128 && !kAmple) || (kHeadDim > 64 && kModest) ? 32
                        : kHeadDim <= 64 && !kModest                               ? 128
                                                                                   : 64;
constexpr int kMinBlocks = kWarps == 8 || (kModest && kHeadDim > 128) ? 1 : 2;  // per SM

// Rows that see few keys keep the remainders of their weights (state.cuh). float16 promises 1e-3; bfloat16 rounds its
// outputs far more coarsely than that.
constexpr bool kKeepsRemainders = QF_DTYPE == QF_F16;

constexpr int kChunks = kHeadDim / 8;  // 16-byte chunks of a row
constexpr int kNTiles = kBlockN / 8;

// Tiles of K and V in flight: one being read, one arriving. Turing has no asynchronous copies and little room.
constexpr int kStages = kScarce ? 1 : 2;
constexpr int kQBytes = kBlockM * kHeadDim * 2, kTileBytes = kBlockN * kHeadDim * 2;
constexpr int kStateBytes = 320;
constexpr int kSharedBytes = kQBytes + 2 * kStages * kTileBytes + kStateBytes;
static_assert(kSharedBytes <= kSharedLimit, "the tiles do not fit the shared memory of this architecture");

}  // namespace fa_mma
}  // namespace qf
