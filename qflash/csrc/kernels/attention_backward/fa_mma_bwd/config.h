// Tile shapes of `fa_mma_bwd`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the true head_dim comes at
// run time), -DQF_DTYPE (QF_F16 or QF_BF16) and -DQF_ARCH (compute capability times ten).
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

// Both kernels have as many stationary rows and streamed columns: a pair of tiles of kBlockRows stays, kStages pairs of
// kBlockColumns pass.
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
// lse and delta, of rows, or of the streamed columns of each stage.
constexpr int kStatisticsBytes = 2 * 4 * (kBlockRows > kStages * kBlockColumns ? kBlockRows : kStages * kBlockColumns);
constexpr int kSharedBytes = 2 * kStationaryBytes + 2 * kStages * kTileBytes + kStatisticsBytes + kStateBytes;
static_assert(kSharedBytes <= kSharedLimit, "the tiles do not fit the shared memory of this architecture");

// Keys stationary: keys of a warp in blocks of 16. Two halve the reads of Q and dO from shared memory, but dK and dV of
// two fit the registers only up to head_dim 64. From head_dim 192 on those of one do not, either: dV and dK are then
// computed by kernels of their own.
constexpr int kKeyMTiles = kHeadDim <= 64 && !kScarce ? 2 : 1;
constexpr int kKeyWarps = kBlockRows / (16 * kKeyMTiles);
constexpr bool kTogether = kHeadDim <= 128;
// Columns whose scores are held at once; tiles that pass through registers leave fewer of these.
template <bool kAsync>
constexpr int kKeyStep = kBlockColumns < 32 || (kKeyMTiles == 2 && kHeadDim > 32 && !kAsync) ? 16
                         : kHeadDim <= 64 && kKeyMTiles == 1                                 ? 64
                                                                                             : 32;

// Queries stationary: rows of a warp in blocks of 16. Two halve the reads of K and V from shared memory.
constexpr int kMTiles = kHeadDim > 128 || kScarce ? 1 : 2;
constexpr int kQueryWarps = kBlockRows / (16 * kMTiles);
template <bool kAsync>
constexpr int kQueryStep = kBlockColumns < 32 || (kMTiles == 2 && kHeadDim > 96 && !kAsync) ? 16 : 32;

// Blocks per multiprocessor that registers are for: all of them for 256 threads. The compiler might aim at more blocks.
constexpr int min_blocks(int threads) { return threads < 256 ? 256 / threads : 1; }

}  // namespace fa_mma_bwd
}  // namespace qf
