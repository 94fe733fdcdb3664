// softmax: out[i] = softmax(scale x[i]) for every row of a matrix.
//
//   row in registers   x -> (m, l) of the thread -> one reduction -> out          DRAM: row read once, written once
//   longer rows        pieces of x -> (m, l) -> one reduction -> pieces again     read twice, the second time mostly L2
//
// A thread weighs its share against its own maximum and keeps the weights, 2^(x - m_thread). After the reduction of the
// pairs (m, l) it multiplies them by 2^(m_thread - m) / l: one exponential per element, one pass through the tree.
//
// Roles: a warp per row up to 1024 columns, a block beyond (reduce/row_shape.cuh). Registers: 32 elements per thread.
// Shared memory: 32 words of m, 32 of l (reduce/block.cuh); none for warps.
// Pipeline: none inside a block; blocks on the same SM load, reduce and store at different times.
// Bound: memory. See docs/kernels/reductions.md.
#pragma once

#include "kernels/softmax/softmax/config.h"
#include "qflash_ops.h"
#include "reduce/row_softmax.cuh"

namespace qf {
namespace softmax {

constexpr int kSharedBytes = block_bytes<Peak>();

}  // namespace softmax
}  // namespace qf

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    qf_softmax_kernel(const __grid_constant__ QfRowsParams p, const __grid_constant__ qf::RowGrid grid) {
  using namespace qf;
  using namespace qf::softmax;
  extern __shared__ float4 s_memory[];
  const typename Shape::Team team;
  const int64_t row = team.row(grid);
  if (row >= p.rows) return;
  const Element* g_x = static_cast<const Element*>(p.x) + row * p.x_stride;
  Element* g_out = static_cast<Element*>(p.out) + row * p.out_stride;
  const RowCut cut = cut_row(g_x, int(p.columns));
  const ScoreMap map = score_map(p.scale);
  const CombinePeaks combine = {map.factor};
  const int step = team.size() * Shape::kVecs;

  RowShare<Element, Shape::kVecs> share;
  load_scores(share, g_x, cut, team, 0, map);
  const Peak first = peak_of(share, map.factor);
  Peak peak = first;
  for (int g = step; !Shape::kWhole && g < cut.granules; g += step) {
    load_scores(share, g_x, cut, team, g, map);
    peak = combine(peak, peak_of(share, map.factor));
  }
  peak = team.reduce(peak, PeakOfWarp{map.factor}, no_peak(), reinterpret_cast<uint32_t*>(s_memory));

  const float inverse = 1.0f / peak.l;
  const auto store = [&](float weight) {
    store_share(share, g_out, cut, team, [&](auto& y, int) {
      for (float& element : y) element *= weight;
    });
  };
  if (Shape::kWhole) {
    store(rescale_of(first.m, peak.m, map.factor) * inverse);
  } else {
    for (int g = 0; g == 0 || g < cut.granules; g += step) {
      load_scores(share, g_x, cut, team, g, map);
      weigh(share, peak.m, map.factor);
      store(inverse);
    }
  }
}
