// Tile shapes of `fa_bwd`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the actual head_dim is known at
// run time) and -DQF_DTYPE (a QfDtype). They fit the shared memory of every architecture.
#pragma once

#include "attn/cuda_core/product.cuh"
#include "common/elements.cuh"
#include "smem/lanes.cuh"

namespace qf {
namespace fa_bwd {

constexpr int kHeadDim = QF_HEAD_DIM;
using Element = ElementOf<QF_DTYPE>::Type;

// A lane owns 8 stationary rows x kColumns / kLanesX scores, and 8 rows x kHeadDim / kLanesX of each gradient.
constexpr int kLanesX = kHeadDim % 64 == 0 ? 16 : 8, kLanesY = 32 / kLanesX;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kMinBlocks = 2;  // per SM: registers are budgeted for two, the compiler might aim at three
constexpr int kWarpRows = kRows * kLanesY, kBlockRows = kWarps * kWarpRows;
constexpr int kColumns = kLanesX == 8 || kHeadDim > 128 ? 32 : 64;  // streamed rows of a tile
constexpr bool kTogether = kHeadDim <= 64;                          // the registers hold dK and dV at once

constexpr int kScoreCols = kColumns / kLanesX;
constexpr int kOutVecs = kHeadDim / (4 * kLanesX);

// Products over channels take both operands in chunks of kDepth channels; those over columns take the streamed one in
// chunks of kDepthRows rows. Both kinds of chunks use the same shared memory.
constexpr int kDepth = 32, kDepthRows = 16;
constexpr int kDepthStride = padded_row(kDepth), kPStride = score_row(kColumns, kLanesX);
constexpr int kAFloats = kBlockRows * kDepthStride, kBFloats = kColumns * kDepthStride;
constexpr int kRowsFloats = kDepthRows * kHeadDim;
constexpr int kChunkFloats = kAFloats + kBFloats > kRowsFloats ? kAFloats + kBFloats : kRowsFloats;
constexpr int kStageFloats = kWarps * kLanesY * kHeadDim;  // rows of the epilogue
static_assert(kStageFloats <= kChunkFloats, "");
constexpr int kPFloats = kBlockRows * kPStride;
constexpr int kStatisticsFloats = 2 * (kColumns > kBlockRows ? kColumns : kBlockRows);
constexpr int kSharedBytes = 4 * (kChunkFloats + kPFloats + kStatisticsFloats);
static_assert(kSharedBytes <= 64 * 1024, "the tiles do not fit the shared memory of every architecture");

}  // namespace fa_bwd
}  // namespace qf
