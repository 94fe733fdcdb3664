// Which instance of the kernel serves a problem. Host side.
#pragma once

#include <type_traits>

#include "gemm/schedule.cuh"
#include "kernels/linear/int8_gemm_tc/load.cuh"

namespace qf {
namespace int8_gemm_tc {

template <class Shape_, template <int, int> class A, template <int, int> class B>
struct Instance {
  using Shape = Shape_;
  using LoadA = A<Shape::kBlockM, Shape::kThreads>;
  using LoadB = B<Shape::kBlockN, Shape::kThreads>;
};

// Calls run(Instance{}) with the instance that serves `p` on a GPU of so many multiprocessors: below as many wide
// tiles, square ones keep more of them busy.
template <class Run>
int choose(const QfLinearParams& p, int multiprocessors, Run run) {
  const bool along_k = gemm::k_contiguous(p);
  if constexpr (kAsync) {
    using Large = std::conditional_t<kHasWide, Wide, Square>;
    const gemm::Grid grid = gemm::grid_of(p, Large::kBlockM, Large::kBlockN);
    const bool large = !kHasWide || int64_t(grid.row_tiles) * grid.column_tiles >= multiprocessors * Large::kBlocks;
    if (along_k && grid.a.vector && grid.b.vector)
      return large ? run(Instance<Large, AsyncRows, AsyncRows>{}) : run(Instance<Square, AsyncRows, AsyncRows>{});
    if (!along_k && grid.a.vector && large) return run(Instance<Large, AsyncRows, HeldColumns>{});
  }
  return along_k ? run(Instance<Square, HeldRows, HeldRows>{}) : run(Instance<Square, HeldRows, HeldColumns>{});
}

}  // namespace int8_gemm_tc
}  // namespace qf
