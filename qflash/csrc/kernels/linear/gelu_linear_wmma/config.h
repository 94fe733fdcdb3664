// Tiles of `gelu_linear_wmma`, which fit every architecture since Turing. It is specialised for -DQF_DTYPE (QF_F16 or
// QF_BF16) and -DQF_ACTIVATION (QF_GELU or QF_GELU_TANH).
#pragma once

#include "gemm/slab.cuh"

namespace qf {
namespace gelu_linear_wmma {

using Element = ElementOf<QF_DTYPE>::Type;
constexpr int kActivation = QF_ACTIVATION;
static_assert(kActivation == QF_GELU || kActivation == QF_GELU_TANH, "the fused activation is GeLU");

// 8 warps as 4 x 2 over a tile of 128 x 128, each with 32 x 64 accumulators: 2 x 4 fragments of 16 x 16.
constexpr int kThreads = 256, kBlock = 128, kBlockK = 32, kBandRows = 16;
constexpr int kWarpsM = 4, kWarpM = 32, kRowTiles = kWarpM / 16, kColumnTiles = gemm::kWarpN / 16;

// wmma takes one stride for a whole matrix, which rules out a swizzle; 16 bytes of padding avoid the same conflicts.
// Eight neighbouring rows at one column then start in eight different groups of four banks: rows are an odd number of
// chunks of 16 bytes.
constexpr int kPadding = 8;                       // elements
constexpr int kStride = kBlockK + kPadding;       // of rows along k
constexpr int kDownStride = kBlock + kPadding;    // of rows along n
constexpr int kTileBytes = 2 * kBlock * kStride;  // of x, or of w in either layout
static_assert(2 * kBlockK * kDownStride <= kTileBytes, "a tile along n is no larger");

// Two buffers of x and w. In the epilogue they are slabs of accumulators, one for each warp.
constexpr int kSharedBytes = 2 * 2 * kTileBytes;
static_assert(kThreads / 32 * gemm::kSlabWords * 4 <= kSharedBytes, "the sums of 16 rows of every warp fit");

}  // namespace gelu_linear_wmma
}  // namespace qf
