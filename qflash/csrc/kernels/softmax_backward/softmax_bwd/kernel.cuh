// softmax_bwd: dx[i] = scale out[i] (dout[i] - sum(out[i] dout[i])) for every row of a matrix.
//
//   rows in registers   out, dout -> sum of the thread -> one reduction -> dx    DRAM: two rows read, one written
//   longer rows         pieces of both -> sum -> one reduction -> pieces again   read twice, the second time mostly L2
//
// Roles: a warp per row up to 1024 columns, a block beyond (reduce/row_shape.cuh). Registers: 32 elements of each row
// per thread, in their memory format.
// Shared memory: 32 words (reduce/block.cuh); none for warps.
// Bound: memory. See docs/kernels/reductions.md.
#pragma once

#include "kernels/softmax_backward/softmax_bwd/config.h"
#include "qflash_ops.h"
#include "reduce/row_pair.cuh"

namespace qf {
namespace softmax_bwd {

constexpr int kSharedBytes = block_bytes<float>();

struct SumOfWarp {
  __device__ __forceinline__ float operator()(float mine, int width) const { return sum_of_warp(mine, width); }
};

}  // namespace softmax_bwd
}  // namespace qf

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    qf_softmax_bwd_kernel(const __grid_constant__ QfSoftmaxBwdParams p, const __grid_constant__ qf::RowGrid grid) {
  using namespace qf;
  using namespace qf::softmax_bwd;
  extern __shared__ float4 s_memory[];
  const typename Shape::Team team;
  const int64_t row = team.row(grid);
  if (row >= p.rows) return;
  const Element* g_out = static_cast<const Element*>(p.out) + row * p.out_stride;
  const Element* g_dout = static_cast<const Element*>(p.dout) + row * p.dout_stride;
  Element* g_dx = static_cast<Element*>(p.dx) + row * p.dx_stride;
  const RowCut cut = cut_row(g_out, int(p.columns));
  const int step = team.size() * Shape::kVecs;

  RawShare<Element, Shape::kVecs> out, dout;
  float delta = 0.0f;
  const auto load = [&](int g) {
    out.load(g_out, cut, team, g, 0.0f);
    load_beside(dout, g_dout, cut, team, g);
  };
  const auto add = [&] {
    see_pair(out, dout, cut, team, [&](auto& x, auto& y, int) {
      constexpr int kCount = int(sizeof(x) / sizeof(float));
#pragma unroll
      for (int i = 0; i < kCount; ++i) y[i] *= x[i];
      delta += tree_sum(y);
    });
  };
  load(0);
  add();
  for (int g = step; !Shape::kWhole && g < cut.granules; g += step) {
    load(g);
    add();
  }
  delta = team.reduce(delta, SumOfWarp{}, 0.0f, reinterpret_cast<uint32_t*>(s_memory));

  const auto store = [&] {
    store_pair(out, dout, g_dx, cut, team, [&](auto& x, auto& y, int) {
      constexpr int kCount = int(sizeof(x) / sizeof(float));
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = x[i] * (y[i] - delta) * p.scale;
    });
  };
  if (Shape::kWhole) {
    store();
  } else {
    for (int g = 0; g == 0 || g < cut.granules; g += step) {
      load(g);
      store();
    }
  }
}
