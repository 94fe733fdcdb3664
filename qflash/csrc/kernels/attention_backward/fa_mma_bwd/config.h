// Tile shapes of `fa_mma_bwd`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the actual head_dim is known
// at run time), -DQF_DTYPE (QF_F16 or QF_BF16) and -DQF_ARCH (compute capability times ten).
#pragma once

#include "attn/mma/product.cuh"
#include "common/elements.cuh"
#include "smem/limits.h"

namespace qf {
namespace fa_mma_bwd {

constexpr int kHeadDim = QF_HEAD_DIM;
constexpr int kArch = QF_ARCH;
using Element = ElementOf<QF_DTYPE>::Type;
using Tensor = Tensor16<Element, kArch>;

constexpr int kSharedLimit = shared_limit(kArch);
constexpr bool kScarce = kSharedLimit <= 64 * 1024;   // Turing
constexpr bool kModest = kSharedLimit <= 100 * 1024;  // and the small Amperes and Adas
constexpr bool kAmple = kSharedLimit > 200 * 1024;    // Hopper

// Both kernels have the same numbers of stationary rows and streamed columns: a pair of tiles of kBlockRows stays,
// kStages pairs of kBlockColumns stream by.
constexpr int kBlockRows = kScarce                                                      ? (kHeadDim > 192 ? 32 : 64)
                           : (kHeadDim > 192 && !kAmple) || (kHeadDim > 128 && kModest) ? 64
                                                                                        : 128;
constexpr int kBlockColumns = kScarce                                        ? (kHeadDim > 128  ? 16
                                                                                : kHeadDim > 96 ? 32
                                                                                                : 64)
                              : kHeadDim > 128 || (kModest && kHeadDim > 96) ? 32
                                                                             : 64;
constexpr int kStages = kScarce || (kModest && kHeadDim > 192) ? 1 : 2;

constexpr int kChunks = kHeadDim / 8;  // 16-byte chunks of a row
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kStationaryBytes = kBlockRows * kRowBytes, kTileBytes = kBlockColumns * kRowBytes;
constexpr int kStateBytes = 512;
// lse and delta of the stationary rows, or of the streamed columns of each stage.
constexpr int kStatisticsBytes = 2 * 4 * (kBlockRows > kStages * kBlockColumns ? kBlockRows : kStages * kBlockColumns);
constexpr int kSharedBytes = 2 * kStationaryBytes + 2 * kStages * kTileBytes + kStatisticsBytes + kStateBytes;
static_assert(kSharedBytes <= kSharedLimit, "the tiles do not fit the shared memory of this architecture");

// Keys stationary: keys of a warp in blocks of 16. Two halve the reads of Q and dO from shared memory, but dK and dV of
// two fit the registers only up to head_dim 64. At 128 two warps share them, where shared memory has room for what they
// exchange. From head_dim 192 on dK and dV of one block do not fit, either: separate kernels compute them.
constexpr int kKeyShare = kHeadDim == 128 && !kModest ? 2 : 1;
constexpr int kKeyMTiles = kKeyShare == 2 || (kHeadDim <= 64 && !kScarce) ? 2 : 1;
constexpr int kKeyWarps = kBlockRows / (16 * kKeyMTiles) * kKeyShare;
constexpr int kKeyChunks = kChunks / kKeyShare;  // channels of dK and dV of a warp, in chunks
constexpr int kExchangeBytes = kKeyShare == 2 ? 2 * kBlockRows * kBlockColumns * 2 : 0;
constexpr int kKeySharedBytes = kSharedBytes + kExchangeBytes;
static_assert(kKeySharedBytes <= kSharedLimit, "what pairs of warps exchange does not fit");
constexpr bool kTogether = kHeadDim <= 128;
// Columns whose scores are held at once; tiles that go through registers, and slopes of a softcap, leave fewer.
template <bool kAsync, bool kPlain>
constexpr int kKeyStep = kBlockColumns < 32 || (kKeyMTiles == 2 && kHeadDim > 32 && !(kAsync && kPlain)) ? 16
                         : kHeadDim <= 64 && kScarce                                                     ? 64
                                                                                                         : 32;
// Where dS is stored: after the product that it is the A operand of, so that registers need not be moved twice, or
// before, which takes fewer of them.
constexpr bool kStoresDsLast = kArch >= 90 && kKeyShare == 1;

// Queries stationary: rows of a warp in blocks of 16. Two halve the reads of K and V from shared memory.
constexpr int kMTiles = kHeadDim > 128 || kScarce ? 1 : 2;
constexpr int kQueryWarps = kBlockRows / (16 * kMTiles);
template <bool kAsync, bool kPlain>
constexpr int kQueryStep = kBlockColumns < 32 || (kMTiles == 2 && kHeadDim > 96 && !(kAsync && kPlain)) ? 16 : 32;
// Tiles that go through registers leave too few for what a softcap needs.
template <bool kAsync, bool kPlain>
constexpr bool kScoresAnew = kModest && kHeadDim > 192 && !kAsync && !kPlain;

// dQ as a product of stored dS and K, whose tiles have 64 keys and 64 queries. A warp owns 64 rows of dQ and a part of
// the channels, or 32 rows and all of them where head_dim is small.
constexpr bool kKeepsDs = kBlockRows % 64 == 0;  // a block of the keys' kernel writes whole tiles
constexpr int kProductRows = 128;
constexpr int kProductAcross = kHeadDim <= 64 ? 1 : kHeadDim <= 128 ? 2 : 4;  // warps that share channels
constexpr int kProductMTiles = kHeadDim <= 64 ? 2 : 4;
constexpr int kProductChunks = kChunks / kProductAcross;  // channels of a warp, in chunks
constexpr int kProductWarps = kProductRows / (16 * kProductMTiles) * kProductAcross;
constexpr int kProductStageBytes = (kProductRows + kHeadDim) * 64 * 2;
// As many stages as fit with kProductBlocks blocks per SM, the number that registers or shared memory allow.
constexpr int kProductBlocks = kModest || kHeadDim > 128 ? 1 : kHeadDim <= 64 && kAmple ? 3 : 2;
constexpr int kProductFit = (kSharedLimit / kProductBlocks - kStateBytes) / kProductStageBytes;
constexpr int kProductStages = kScarce ? 1 : kProductFit > 4 ? 4 : kProductFit;
// At the end they hold rows of float32: a tile of 64 queries, or two where both fit.
constexpr int kRowTileBytes = 64 * 2 * kRowBytes;
constexpr int kProductStoreTiles = 2 * kRowTileBytes <= kProductStages * kProductStageBytes ? 2 : 1;
constexpr int kProductTileBytes = kProductStages * kProductStageBytes > kProductStoreTiles* kRowTileBytes
                                      ? kProductStages * kProductStageBytes
                                      : kProductStoreTiles * kRowTileBytes;
constexpr int kProductSharedBytes = kProductTileBytes + kStateBytes;
static_assert(!kKeepsDs || (kProductStages > 0 && kProductSharedBytes <= kSharedLimit), "");

// Blocks per SM that registers are budgeted for: all of them for 256 threads. The compiler might aim at more blocks.
constexpr int min_blocks(int threads) { return threads < 256 ? 256 / threads : 1; }
constexpr int kKeyBlocks = min_blocks(32 * kKeyWarps);

}  // namespace fa_mma_bwd
}  // namespace qf
