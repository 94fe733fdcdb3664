// Tile shapes of `unfused`. Specialised for -DQF_DTYPE (a QfDtype) alone: any head_dim, any architecture.
#pragma once

#include "attn/cuda_core/product.cuh"
#include "common/elements.cuh"
#include "smem/lanes.cuh"

namespace qf {
namespace unfused {

using Element = ElementOf<QF_DTYPE>::Type;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kLanesX = 16, kLanesY = 2;
constexpr int kWarpRows = kRows * kLanesY;
constexpr int kBlockM = kWarps * kWarpRows;  // query rows of a tile of either product
constexpr int kBlockN = 64;                  // keys of a tile
constexpr int kBlockD = 64;                  // output channels of a tile
constexpr int kChunk = 32;                   // channels of Q and K in shared memory at a time
constexpr int kScoreCols = kBlockN / kLanesX;
constexpr int kOutVecs = kBlockD / (4 * kLanesX);

constexpr int kQStride = padded_row(kChunk), kKStride = padded_row(kChunk);
constexpr int kPStride = score_row(kBlockN, kLanesX), kVStride = kBlockD;
constexpr int kScoresSharedBytes = 4 * (kBlockM * kQStride + kBlockN * kKStride);
constexpr int kOutputSharedBytes = 4 * (kBlockM * kPStride + kBlockN * kVStride);
static_assert(kScoresSharedBytes <= 48 * 1024 && kOutputSharedBytes <= 48 * 1024, "needs no opt-in on any GPU");

constexpr int kSoftmaxRows = kWarps;  // rows of a softmax block: one per warp

}  // namespace unfused
}  // namespace qf
