// Tile shapes of `int8_gemm_tc`, from the only two things it is specialised for: -DQF_ARCH (compute capability times
// ten) and -DQF_DTYPE, the type of out.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/swizzle.cuh"
#include "smem/limits.h"

namespace qf {
namespace int8_gemm_tc {

constexpr int kArch = QF_ARCH;
using Out = gemm::OutOf<QF_DTYPE>::Type;
constexpr int kActivation = QF_ACTIVATION;

constexpr int kSharedLimit = shared_limit(kArch);
constexpr bool kAsync = kArch >= 80;  // cp.async exists

constexpr int kBlockK = kSwizzledRow;  // bytes of a row of a, or of a column of b, per step
constexpr int kBandRows = 16;          // of tiles that share columns of b: gemm/schedule.cuh
constexpr int kWarpN = 64;

// How a block's warps share a tile, each owning kWarpM x 64 sums; how many blocks a multiprocessor is to hold; and with
// that, how deep the pipeline is.
template <int kWarpsM_, int kWarpsN_, int kWarpM_, int kBlocks_ = 1>
struct Shape {
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpM = kWarpM_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kBlockM = kWarpsM * kWarpM, kBlockN = kWarpsN * kWarpN;
  static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK;
  static constexpr int kFitting = kSharedLimit / kBlocks / kStageBytes;
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kStages >= 2, "a pipeline needs two stages");
};

// 128 x 256: 128 sums a lane. Reads of shared memory per product are what limits tensor cores this fast, and they
// shrink with the warp's tile. 99 KB would hold two stages, too few to hide a load: there, as on Turing, it is Square.
using Wide = Shape<2, 4, 64>;
using Square = Shape<4, 2, 32>;
constexpr bool kHasWide = kAsync && kSharedLimit > 100 * 1024;

}  // namespace int8_gemm_tc
}  // namespace qf
