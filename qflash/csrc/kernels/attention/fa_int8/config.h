// Tile shapes of `fa_int8`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the actual head_dim is known at
// run time), -DQF_DTYPE (QF_F16 or QF_BF16: V's, P's and out's), -DQF_ARCH (compute capability times ten) and
// -DQF_KV_KIND (see launch.cu).
#pragma once

#include "attn/mma/product.cuh"
#include "common/elements.cuh"
#include "smem/limits.h"

namespace qf {
namespace fa_int8 {

constexpr int kHeadDim = QF_HEAD_DIM;
constexpr int kArch = QF_ARCH;
using Element = ElementOf<QF_DTYPE>::Type;
using Scores = Tensor8<kArch>;
using Tensor = Tensor16<Element, kArch>;

constexpr int kSharedLimit = shared_limit(kArch);
constexpr bool kScarce = kSharedLimit <= 64 * 1024;   // Turing
constexpr bool kModest = kSharedLimit <= 100 * 1024;  // and the small Amperes and Adas

// As fa_mma's: two blocks of 16 rows per warp where the registers hold their outputs.
constexpr int kMTiles = kHeadDim > 128 || kScarce || (kModest && kHeadDim > 96) ? 1 : 2;
constexpr int kWarps = kHeadDim > 128 && !kModest ? 8 : kHeadDim > 192 && kScarce ? 2 : 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 16 * kMTiles;
constexpr int kBlockM = kWarps * kWarpRows;
constexpr int kBlockN = kHeadDim > 96 && kModest ? 32 : 64;
constexpr int kMinBlocks = kWarps == 8 || (kModest && kHeadDim > 128) ? 1 : 2;  // per SM

constexpr int kChunks = kHeadDim / 8;       // 16-byte chunks of a row of V and of out
constexpr int kByteChunks = kHeadDim / 16;  // of Q and K
constexpr int kNTiles = kBlockN / 8;

// A lane owns kRun neighbouring keys of a tile, in kParts groups of kKeyGroup that share a scale (or in half a group).
constexpr int kKeyGroupLog = 4, kKeyGroup = 1 << kKeyGroupLog;
constexpr int kRun = kBlockN / 4;
constexpr int kParts = kRun > kKeyGroup ? kRun / kKeyGroup : 1;

constexpr int kStages = kScarce ? 1 : 2;
constexpr int kQBytes = kBlockM * kHeadDim, kKBytes = kBlockN * kHeadDim, kVBytes = 2 * kKBytes;
constexpr int kStageBytes = kKBytes + kVBytes;
constexpr int kOutBytes = 2 * kBlockM * kHeadDim;  // replaces everything before it after the main loop
constexpr int kTilesBytes = kQBytes + kStages * kStageBytes > kOutBytes ? kQBytes + kStages * kStageBytes : kOutBytes;
constexpr int kRowBytes = 2 * 4 * kBlockM;  // the values of each query
constexpr int kStateBytes = 320;
constexpr int kSharedBytes = kTilesBytes + kRowBytes + kStateBytes;
constexpr int kStartsBytes = 4 * kStages * kBlockN;  // where accumulators start, with zero points; after all that
static_assert(kSharedBytes + kStartsBytes <= kSharedLimit, "the tiles do not fit this architecture's shared memory");

}  // namespace fa_int8
}  // namespace qf
