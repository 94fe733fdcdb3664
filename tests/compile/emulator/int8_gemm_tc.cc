// `int8_gemm_tc`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes run
// in; `reserved`, when not 0, the instance to run in place of the one `choose` picks.
#include "kernels/int8_matmul/int8_gemm_tc/choose.cuh"
#include "kernels/int8_matmul/int8_gemm_tc/kernel.cuh"

namespace {

using namespace qf::int8_gemm_tc;

template <class Instance>
int launch(const QfInt8MatmulParams& p) {
  using Shape = typename Instance::Shape;
  const qf::gemm::Grid grid = qf::gemm::grid_of(p, Shape::kBlockM, Shape::kBlockN);
  return host::launch_blocks(
      [&] { qf_int8_gemm_tc_kernel<Shape, typename Instance::LoadA, typename Instance::LoadB>(p, grid); },
      int64_t(grid.row_tiles) * grid.column_tiles, Shape::kThreads, Shape::kSharedBytes, p.num_threads);
}

// What `choose` keeps for problems too large to emulate.
int launch_large(const QfInt8MatmulParams& p) {
  if constexpr (kHasWide)
    return qf::gemm::k_contiguous(p) ? launch<Instance<Wide, AsyncRows, AsyncRows>>(p)
                                     : launch<Instance<Wide, AsyncRows, StagedColumns>>(p);
  return -1;
}

}  // namespace

extern "C" int qf_int8_gemm_tc(const QfInt8MatmulParams* p, void*) {
  if (p->reserved) return launch_large(*p);
  return choose(*p, [&](auto instance) { return launch<decltype(instance)>(*p); });
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
