// Compile-time configuration of a GEMM on CUDA cores, and its tiles, which fit every architecture since Turing. A tile
// consists of 32-bit words: four int8 of neighbouring k, or one float, to which 16-bit elements are converted.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/source.cuh"

namespace qf {
namespace gemm {

constexpr int kTiledThreads = 256;
constexpr int kTiledBlock = 128;    // rows, and columns, of a tile
constexpr int kGroups = 16;         // words of a row of x, or of a column of w, per step
constexpr int kTiledBandRows = 12;  // row tiles that share columns of w: gemm/schedule.cuh

// A thread has 8 x 8 accumulators: rows 4y ..+3 and 64 + 4y ..+3, columns 4x ..+3 and 64 + 4x ..+3. A warp is 4 x 8
// lanes (smem/lanes.cuh), the block 4 x 2 warps.
constexpr int kOwn = 8, kLanesX = 8;

// Floats are accumulated in runs of 256 products, whose sums are then added: the rounding errors of one long chain
// would be twice those of a product that cuBLAS splits. The second set of accumulators takes the registers of a second
// block.
constexpr int kRunSteps = 256 / kGroups;

// Shared memory: two buffers of x [kGroups][128] and w [kGroups][128], in words.
constexpr int kTileWords = kGroups * kTiledBlock;
constexpr int kBufferWords = 2 * kTileWords;
constexpr int kTiledSharedBytes = 2 * kBufferWords * 4;

// Element: int8_t, float, F16 or BF16. Out: the type of out; void: Element or float, selected at run time.
template <class Element_, class Out_, int kActivation_>
struct TiledConfig {
  using Element = Element_;
  using Out = Out_;
  using Sum = std::conditional_t<std::is_same_v<Element, int8_t>, int32_t, float>;
  static constexpr int kActivation = kActivation_;
  static constexpr bool kInRuns = std::is_same_v<Sum, float>;
  static constexpr int kMinBlocks = kInRuns ? 1 : 2;  // per SM: caps the registers at 255 or 128
  static constexpr bool kGated = kActivation == QF_SWIGLU;
  static constexpr int kStep = std::is_same_v<Element, int8_t> ? 4 * kGroups : kGroups;  // elements of k
  static constexpr int kOutColumns = kGated ? kTiledBlock / 2 : kTiledBlock;
};

}  // namespace gemm
}  // namespace qf
