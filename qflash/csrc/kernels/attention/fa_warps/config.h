// Tile shapes of `fa_warps`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the actual head_dim is known at
// run time), -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times ten).
#pragma once

#include "attn/cuda_core/product.cuh"
#include "common/elements.cuh"
#include "smem/lanes.cuh"
#include "smem/limits.h"

namespace qf {
namespace fa_warps {

constexpr int kHeadDim = QF_HEAD_DIM;
constexpr int kArch = QF_ARCH;
using Element = ElementOf<QF_DTYPE>::Type;
constexpr bool kAsync = kArch >= 80;         // cp.async
constexpr bool kFolds = QF_DTYPE == QF_F32;  // see attn/cuda_core/fold.cuh

// A lane owns 8 rows x kBlockN/kLanesX scores and 8 rows x kHeadDim/kLanesX outputs.
constexpr int kLanesX = kHeadDim <= 96 ? 8 : 16;
constexpr int kLanesY = 32 / kLanesX;
constexpr int kWarpRows = kRows * kLanesY;

constexpr int kQStride = padded_row(kHeadDim);                  // floats
constexpr int kKStride = kHeadDim + 16 / int(sizeof(Element));  // elements: rows padded by 16 bytes
constexpr int kVStride = kHeadDim;                              // elements

constexpr int kStateBytes = 320;

// Blocks per SM, warps per block, keys per tile.
struct Shape {
  int blocks, warps, keys;
  constexpr int bytes() const {
    return 4 * warps * kWarpRows * (kQStride + score_row(keys, kLanesX) + 1) + kStateBytes +
           int(sizeof(Element)) * keys * (kKStride + kVStride);
  }
};

constexpr int kSharedLimit = shared_limit(kArch);

// The first shape that fits: eight warps per SM, in two blocks or, where Q is too large for that, in one. K and V tiles
// are complete, which takes shared memory that `fa` does not need; the length of a tile is reduced first, then the
// warps. Each block takes 1 KB more than it requests. At head_dim 96 the registers hold the scores of 32 keys only.
constexpr Shape choose() {
  constexpr bool kSmall = kHeadDim <= 96;
  constexpr Shape kShapes[] = {{kSmall ? 2 : 1, kSmall ? 4 : 8, kHeadDim == 96 ? 32 : 64},
                               {kSmall ? 2 : 1, kSmall ? 4 : 8, 32},
                               {1, 4, 32},
                               {1, 4, 16},
                               {1, 2, 16},
                               {1, 1, 16}};
  for (const Shape& shape : kShapes)
    if (shape.blocks * (shape.bytes() + 1024) <= kSharedLimit + 1024) return shape;
  return {0, 0, 0};
}
constexpr Shape kShape = choose();
static_assert(kShape.warps > 0, "no tiles fit the shared memory of this architecture");

constexpr int kWarps = kShape.warps;
constexpr int kThreads = 32 * kWarps;
constexpr int kMinBlocks = kShape.blocks;  // per SM: caps the registers
constexpr int kBlockM = kWarps * kWarpRows;
constexpr int kBlockN = kShape.keys;
constexpr int kPStride = score_row(kBlockN, kLanesX);  // floats

constexpr int kScoreCols = kBlockN / kLanesX;       // scores per row of a lane
constexpr int kOutVecs = kHeadDim / (4 * kLanesX);  // groups of 4 outputs per row of a lane
constexpr int kQkUnroll =
    kHeadDim == 128 || kHeadDim == 192 ? 2 : 1;  // of the loop over channels: 2 where registers are left

constexpr int kQFloats = kBlockM * kQStride, kPFloats = kBlockM * kPStride;
constexpr int kKElements = kBlockN * kKStride;
constexpr int kSharedBytes = kShape.bytes();

}  // namespace fa_warps
}  // namespace qf
