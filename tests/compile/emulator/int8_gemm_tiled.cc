// `int8_gemm_tiled`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes
// run in.
#include "kernels/int8_matmul/int8_gemm_tiled/kernel.cuh"

namespace {

template <class BTile>
int launch(const QfInt8MatmulParams& p) {
  using namespace qf::int8_gemm_tiled;
  const qf::gemm::Grid grid = qf::gemm::grid_of(p, kBlockM, kBlockN);
  return host::launch_blocks([&] { qf_int8_gemm_tiled_kernel<BTile>(p, grid); },
                             int64_t(grid.row_tiles) * grid.column_tiles, kThreads, kSharedBytes, p.num_threads);
}

}  // namespace

extern "C" int qf_int8_gemm_tiled(const QfInt8MatmulParams* p, void*) {
  using namespace qf::int8_gemm_tiled;
  return qf::gemm::k_contiguous(*p) ? launch<RowsTile>(*p) : launch<ColumnsTile>(*p);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
