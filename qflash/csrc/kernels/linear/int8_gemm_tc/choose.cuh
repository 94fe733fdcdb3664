// Which instance of the kernel serves a problem. Host side.
#pragma once

#include "gemm/mma/load.cuh"
#include "gemm/schedule.cuh"
#include "kernels/linear/int8_gemm_tc/config.h"

namespace qf {
namespace int8_gemm_tc {

using gemm::Source;

template <class Shape_, template <int, int, Source> class X, template <int, int, Source> class W>
struct Instance {
  using Shape = Shape_;
  using LoadX = X<Shape::kBlockM, Shape::kThreads, Source::kOne>;
  using LoadW = W<Shape::kBlockN, Shape::kThreads, Config::kGated ? Source::kPaired : Source::kOne>;
};

// Calls run(Instance{}) with the instance that serves `p` on a GPU of this many SMs: with fewer wide tiles than SMs,
// square tiles keep more SMs busy.
template <class Run>
int choose(const QfLinearParams& p, int multiprocessors, Run run) {
  using namespace gemm;
  using Square = Config::Square;
  const bool along_k = w_along_k(p);
  if constexpr (Config::kAsync) {
    using Large = Config::Wide;
    const Grid grid = grid_of(p, operands_of(p), Large::kBlockM, kOutColumns<Config, Large>);
    const bool large =
        !Config::kHasWide || int64_t(grid.row_tiles) * grid.column_tiles >= multiprocessors * Large::kBlocks;
    const bool vector = grid.w[0].vector && (!Config::kGated || grid.w[1].vector);
    if (along_k && grid.x.vector && vector)
      return large ? run(Instance<Large, AsyncRows, AsyncRows>{}) : run(Instance<Square, AsyncRows, AsyncRows>{});
    if (!along_k && grid.x.vector && large) return run(Instance<Large, AsyncRows, HeldColumns>{});
  }
  return along_k ? run(Instance<Square, HeldRows, HeldRows>{}) : run(Instance<Square, HeldRows, HeldColumns>{});
}

}  // namespace int8_gemm_tc
}  // namespace qf
