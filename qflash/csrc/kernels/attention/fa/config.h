// Tile shapes of `fa`, from the only three things it is specialised for: -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192
// or 256; the actual head_dim is known at run time), -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times
// ten).
#pragma once

#include "attn/cuda_core/product.cuh"
#include "common/elements.cuh"
#include "smem/lanes.cuh"
#include "smem/limits.h"

namespace qf {
namespace fa {

constexpr int kHeadDim = QF_HEAD_DIM;
constexpr int kArch = QF_ARCH;
using Element = ElementOf<QF_DTYPE>::Type;

constexpr int kSharedLimit = shared_limit(kArch);
constexpr bool kScarce = kSharedLimit <= 64 * 1024;        // Turing
constexpr bool kLean = kHeadDim == 32 || kHeadDim == 128;  // fits four warps even there

// A lane owns 8 rows x kBlockN/kLanesX scores and 8 rows x kHeadDim/kLanesX outputs: 8x8 and 8x8 at head_dim 64,
// 8x4 and 8x8 at 128. More would spill, less would leave the FMA units waiting for shared memory.
constexpr int kLanesX = kHeadDim <= 96 ? 8 : 16;
constexpr int kLanesY = 32 / kLanesX;
constexpr int kWarps = kScarce && !kLean ? 2 : kHeadDim == 256 && kSharedLimit > 200 * 1024 ? 8 : 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kMinBlocks = kWarps == 8 ? 1 : 2;  // per SM: caps the registers
constexpr int kWarpRows = kRows * kLanesY;
constexpr int kBlockM = kWarps * kWarpRows;
// The remaining registers: 64 keys per tile, or 32 where the outputs leave less (or the shared memory does).
constexpr bool kWide = kHeadDim == 96 || (kHeadDim == 256 && kWarps != 8);
constexpr int kBlockN = kWide || kScarce ? 32 : 64;

// K is loaded in chunks of kChunk channels, V in chunks of kVRows keys, through one pair of buffers of kBufferFloats.
constexpr int kChunk = 32;
constexpr int kKSteps = kHeadDim / kChunk;
constexpr int kVRows = kHeadDim <= 64 ? 32 : kHeadDim <= 128 && !kScarce ? 16 : 8;
constexpr int kVSteps = kBlockN / kVRows;
constexpr int kQkUnroll = kHeadDim == 64 || kHeadDim == 256 ? 1 : 2;  // of the loop over channels; 2 would spill there

constexpr bool kFolds = QF_DTYPE == QF_F32;  // see attn/cuda_core/fold.cuh

constexpr int kScoreCols = kBlockN / kLanesX;       // scores per row of a lane
constexpr int kOutVecs = kHeadDim / (4 * kLanesX);  // groups of 4 outputs per row of a lane

constexpr int kQStride = padded_row(kHeadDim);
constexpr int kKStride = padded_row(kChunk);
constexpr int kVStride = kHeadDim;
constexpr int kPStride = score_row(kBlockN, kLanesX);

constexpr int kKFloats = kBlockN * kKStride, kVFloats = kVRows * kVStride;
constexpr int kBufferFloats = kKFloats > kVFloats ? kKFloats : kVFloats;
constexpr int kQFloats = kBlockM * kQStride, kPFloats = kBlockM * kPStride;
constexpr int kMaxFloats = kBlockM;           // running maximum of each row; the same again for the last fold
constexpr int kSumFloats = kRows * kThreads;  // running sum of each row and lane
constexpr int kSharedBytes = 4 * (kQFloats + kPFloats + 2 * kBufferFloats + 2 * kMaxFloats + kSumFloats);
static_assert(kSharedBytes <= kSharedLimit, "the tiles do not fit the shared memory of this architecture");

}  // namespace fa
}  // namespace qf
