// Tile shapes of `fa_tc`, from -DQF_HEAD_DIM (a bucket: 32, 64, 96, 128, 192 or 256; the actual head_dim is known at
// run time), -DQF_DTYPE (QF_F16 or QF_BF16) and -DQF_ARCH (compute capability times ten).
#pragma once

#include "attn/wmma/tile.cuh"
#include "common/elements.cuh"
#include "smem/limits.h"

namespace qf {
namespace fa_tc {

constexpr int kHeadDim = QF_HEAD_DIM;
constexpr int kArch = QF_ARCH;
using Element = ElementOf<QF_DTYPE>::Type;
constexpr int kSharedLimit = shared_limit(kArch);
constexpr bool kKeepsRemainders = QF_DTYPE == QF_F16;  // see attn/wmma/softmax.cuh

// Rows of a warp: two blocks of 16 halve the reads of K and V, and give each lane its own row in the softmax. The
// registers hold the outputs of two up to head_dim 128; Turing's shared memory up to 96.
constexpr int kWarpRows = kHeadDim > 128 || (kSharedLimit <= 64 * 1024 && kHeadDim > 96) ? 16 : 32;
constexpr int kMTiles = kWarpRows / 16;
constexpr int kOTiles = kHeadDim / 16;

constexpr int kStride = padded_stride(kHeadDim);  // elements, of Q, K and V
constexpr int kScoreStride = kWarpRows + 4;       // floats: scores are stored by columns, one column per key
constexpr int kFactorStride = 24;                 // floats: 16 equal factors per row
constexpr int kStateBytes = 320;

constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int score_bytes(int keys) { return 4 * keys * kScoreStride; }
constexpr int weight_bytes(int keys) { return 2 * kWarpRows * padded_stride(keys); }
constexpr int factor_bytes() { return 4 * kWarpRows * kFactorStride; }

// Blocks per SM, warps per block, keys per tile.
struct Shape {
  int blocks, warps, keys;
  // Memory of a warp: scores; then, in their place, weights, followed first by factors, then by the weights'
  // remainders.
  constexpr int warp_bytes() const {
    return larger(score_bytes(keys), weight_bytes(keys) + larger(factor_bytes(), weight_bytes(keys)));
  }
  constexpr int bytes() const {
    return 2 * (warps * kWarpRows + 2 * keys) * kStride + warps * warp_bytes() + kStateBytes;
  }
};

// The first shape that fits: eight warps per SM, in two blocks or, where the tiles are too large, in one; then shorter
// tiles; then fewer warps. Each block takes 1 KB more than it requests.
constexpr Shape choose() {
  constexpr Shape kShapes[] = {{2, 4, 64}, {1, 8, 64}, {2, 4, 32}, {1, 8, 32}, {1, 4, 64}, {1, 4, 32}, {1, 2, 32}};
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
constexpr int kNTiles = kBlockN / 16;
constexpr int kPStride = padded_stride(kBlockN);  // elements
constexpr int kOutColumns = kBlockN == 64 && kHeadDim % 64 == 0 ? 64 : 32;

constexpr int kQBytes = 2 * kBlockM * kStride, kTileBytes = 2 * kBlockN * kStride;
constexpr int kWeightBytes = weight_bytes(kBlockN);
constexpr int kWarpBytes = kShape.warp_bytes();
constexpr int kSharedBytes = kShape.bytes();
static_assert(4 * kWarpRows * (kOutColumns + 4) <= kWarpBytes, "a warp's outputs pass through its own shared memory");

}  // namespace fa_tc
}  // namespace qf
