// Tile shapes of `int8_gemm_tiled`. They fit every architecture since Turing: all that is chosen at compile time is the
// type of out, by -DQF_DTYPE.
#pragma once

#include "gemm/epilogue.cuh"

namespace qf {
namespace int8_gemm_tiled {

using Out = gemm::OutOf<QF_DTYPE>::Type;
constexpr int kActivation = QF_ACTIVATION;

constexpr int kThreads = 256;
constexpr int kBlockM = 128, kBlockN = 128;
constexpr int kBlockK = 64;           // bytes of a row of a, or of a column of b, per step
constexpr int kGroups = kBlockK / 4;  // words of four k
constexpr int kBandRows = 12;         // of tiles that share columns of b: gemm/schedule.cuh

// A thread owns 8 x 8 sums: rows 4y ..+3 and 64 + 4y ..+3, columns 4x ..+3 and 64 + 4x ..+3. A warp is 4 x 8 lanes
// (smem/lanes.cuh), the block 4 x 2 warps.
constexpr int kOwn = 8, kLanesX = 8;
constexpr int kMinBlocks = 2;  // per multiprocessor: caps the registers at 128

// Shared memory: two buffers of a [kGroups][kBlockM] and b [kGroups][kBlockN], in words.
constexpr int kTileWords = kGroups * kBlockM;
constexpr int kBufferWords = 2 * kTileWords;
constexpr int kSharedBytes = 2 * kBufferWords * 4;
static_assert(kBlockM == kBlockN, "a's and b's tiles share their walks");

}  // namespace int8_gemm_tiled
}  // namespace qf
