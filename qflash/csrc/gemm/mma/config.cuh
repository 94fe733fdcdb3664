// Compile-time configuration of a GEMM on mma.sync, and its tile shapes. In bytes, 8-bit and 16-bit operands are one
// kernel: a step is 128 bytes of k, and a quarter of it is the depth of one mma of either type.
#pragma once

#include <type_traits>

#include "gemm/slab.cuh"
#include "gemm/swizzle.cuh"
#include "smem/limits.h"

namespace qf {
namespace gemm {

constexpr int kStepBytes = kSwizzledRow;  // of k, of a row of x or of a column of w
constexpr int kQuarterBytes = 32;         // of k per mma
constexpr int kBandRows = 16;             // row tiles that share columns of w: gemm/schedule.cuh

// How a tile is divided among a block's warps, kWarpM x kWarpN accumulators each; how many blocks an SM should hold;
// and, given that, the number of pipeline stages.
template <int kArch, int kWarpsM_, int kWarpsN_, int kWarpM_, int kBlocks_ = 1>
struct MmaShape {
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpM = kWarpM_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlockM = kWarpsM * kWarpM, kBlockN = kWarpsN * kWarpN;
  static constexpr int kStageBytes = (kBlockM + kBlockN) * kStepBytes;
  static constexpr int kFitting = shared_limit(kArch) / kBlocks / kStageBytes;
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kStages >= 2, "a pipeline needs two stages");
};

// Element: int8_t, F16 or BF16. Out: the type of out; void: Element or float, selected at run time.
template <class Element_, class Out_, int kArch_, int kActivation_>
struct MmaConfig {
  using Element = Element_;
  using Out = Out_;
  using Sum = std::conditional_t<std::is_same_v<Element, int8_t>, int32_t, float>;
  static constexpr int kArch = kArch_, kActivation = kActivation_;
  static constexpr bool kGated = kActivation == QF_SWIGLU;  // half of a tile's columns are w's, half are up's
  static constexpr bool kAsync = kArch >= 80;               // cp.async exists

  // 128 x 256: 128 accumulators per lane. Shared memory reads per MMA limit tensor cores this fast, and a larger warp
  // tile needs fewer of them. 99 KB would hold two stages, too few to hide a load: there, as on Turing, Wide is Square.
  static constexpr bool kHasWide = kAsync && shared_limit(kArch) > 100 * 1024;
  using Square = MmaShape<kArch, 4, 2, 32>;
  using Wide = std::conditional_t<kHasWide, MmaShape<kArch, 2, 4, 64>, Square>;
};

// Columns of out in a tile.
template <class Config, class Shape>
constexpr int kOutColumns = Config::kGated ? Shape::kBlockN / 2 : Shape::kBlockN;

}  // namespace gemm
}  // namespace qf
