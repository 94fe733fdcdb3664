// Which instance of the kernel serves a problem, and its launch. Host side.
#pragma once

#include "gemm/entry.cuh"
#include "kernels/linear/gemm_mma/kernel.cuh"

namespace qf {
namespace gemm_mma {

using gemm::Source;

// The kernel on tiles of Shape. kAsync: both operands are copied by cp.async, else both pass through registers.
template <class Config, class Shape, bool kAsync, bool kXAlongK, bool kWAlongK, Source kWeights>
int launch(const QfLinearParams& p, const gemm::Operands& operands, void* stream) {
  using namespace gemm;
  constexpr int kM = Shape::kBlockM, kN = Shape::kBlockN, kThreads = Shape::kThreads;
  constexpr Source kOne = Source::kOne;
  using LoadX =
      std::conditional_t<kXAlongK,
                         std::conditional_t<kAsync, AsyncRows<kM, kThreads, kOne>, HeldRows<kM, kThreads, kOne>>,
                         std::conditional_t<kAsync, AsyncPanels<kM, kThreads, kOne>, HeldPanels<kM, kThreads, kOne>>>;
  using LoadW = std::conditional_t<
      kWAlongK, std::conditional_t<kAsync, AsyncRows<kN, kThreads, kWeights>, HeldRows<kN, kThreads, kWeights>>,
      std::conditional_t<kAsync, AsyncPanels<kN, kThreads, kWeights>, HeldPanels<kN, kThreads, kWeights>>>;
  return gemm::launch(qf_gemm_mma_kernel<Config, Shape, LoadX, LoadW>, p, operands, kM, kOutColumns<Config, Shape>,
                      kThreads, Shape::kSharedBytes, stream);
}

// Runs the instance for operands of this layout. With fewer wide tiles than SMs, square tiles keep more SMs busy.
template <class Config, bool kXAlongK, bool kWAlongK, Source kWeights>
int run(const QfLinearParams& p, const gemm::Operands& operands, void* stream) {
  using namespace gemm;
  using Square = typename Config::Square;
  if constexpr (Config::kAsync) {
    using Wide = typename Config::Wide;
    const Grid grid = grid_of(p, operands, Wide::kBlockM, kOutColumns<Config, Wide>);
    if (grid.x.vector && grid.w[0].vector && (kWeights == Source::kOne || grid.w[1].vector)) {
      int multiprocessors = 0;
      if (const int status = qf::multiprocessors(multiprocessors)) return status;
      if (Config::kHasWide && int64_t(grid.row_tiles) * grid.column_tiles >= multiprocessors)
        return launch<Config, Wide, true, kXAlongK, kWAlongK, kWeights>(p, operands, stream);
      return launch<Config, Square, true, kXAlongK, kWAlongK, kWeights>(p, operands, stream);
    }
  }
  return launch<Config, Square, false, kXAlongK, kWAlongK, kWeights>(p, operands, stream);
}

}  // namespace gemm_mma
}  // namespace qf
