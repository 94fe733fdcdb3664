// cross_entropy_bwd: dlogits[i] = (w_i + dlse[i]) p_i - w_i ((1 - s) [j = targets[i]] + s / columns), as two kernels.
//
//   1 qf_cross_entropy_bwd_share_kernel   targets, dtotal -> what a mean adds to the gradient of each loss
//   2 qf_cross_entropy_bwd_kernel         logits, lse -> p = exp(logit - lse) -> dlogits
//
// With the forward pass's lse a row needs no reduction: a row of any length is read once and written once. w_i is
// dlosses[i] plus the share of the total, 0 if the row is ignored; such a row is not read unless its lse has a
// gradient. The first kernel runs only for a mean, and counts integers: no atomics, same bits.
//
// Roles: a warp per row up to 1024 columns, a block beyond (reduce/row_shape.cuh).
// Bound: memory. See docs/kernels/reductions.md.
#pragma once

#include "kernels/cross_entropy_backward/cross_entropy_bwd/config.h"
#include "qflash_ops.h"
#include "reduce/row.cuh"
#include "reduce/states.cuh"

namespace qf {
namespace cross_entropy_bwd {

struct Count {
  int64_t rows;
};

struct CountOfWarp {
  __device__ __forceinline__ Count operator()(const Count& mine, int width) const {
    return reduce_warp(mine, [](const Count& a, const Count& b) { return Count{a.rows + b.rows}; }, width);
  }
};

constexpr int kShareSharedBytes = block_bytes<Count>();

// Writes zeros to a row, which is cut by its own alignment.
template <class Team>
__device__ __forceinline__ void clear_row(Element* g_row, int columns, const Team& team) {
  const RowCut cut = cut_row(g_row, columns);
  for (int g = team.rank(); g < cut.granules; g += team.size())
    st_streaming(g_row + cut.head + int64_t(g) * kGranule<Element>, Word4{});
  if (team.rank() < cut.edges) g_row[column_of_edge(cut, team.rank())] = Element{};
}

}  // namespace cross_entropy_bwd
}  // namespace qf

__global__ void __launch_bounds__(qf::cross_entropy_bwd::kCountThreads)
    qf_cross_entropy_bwd_share_kernel(const __grid_constant__ QfCrossEntropyBwdParams p) {
  using namespace qf;
  using namespace qf::cross_entropy_bwd;
  extern __shared__ float4 s_memory[];
  Count count = {0};
  for (int64_t row = threadIdx.x; row < p.rows; row += kCountThreads) count.rows += p.targets[row] != p.ignore_index;
  count = reduce_block<false>(count, CountOfWarp{}, Count{0}, reinterpret_cast<uint32_t*>(s_memory));
  if (threadIdx.x == 0) *static_cast<float*>(p.workspace) = float(double(*p.dtotal) / double(count.rows));
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    qf_cross_entropy_bwd_kernel(const __grid_constant__ QfCrossEntropyBwdParams p,
                                const __grid_constant__ qf::RowGrid grid) {
  using namespace qf;
  using namespace qf::cross_entropy_bwd;
  const typename Shape::Team team;
  const int64_t row = team.row(grid);
  if (row >= p.rows) return;
  const int target = p.targets[row];
  const bool ignored = target == p.ignore_index, good = target >= 0 && target < p.columns;
  const Element* g_logits = static_cast<const Element*>(p.logits) + row * p.logits_stride;
  Element* g_dlogits = static_cast<Element*>(p.dlogits) + row * p.dlogits_stride;
  if (ignored && !p.dlse) {
    clear_row(g_dlogits, int(p.columns), team);
    return;
  }

  const float* g_share = p.mean ? static_cast<const float*>(p.workspace) : p.dtotal;
  float w = 0.0f;
  if (!ignored) w = good ? p.dlosses[row] + (p.dtotal ? *g_share : 0.0f) : nan();
  const float factor = p.dlse ? w + p.dlse[row] : w, lse = p.lse[row];
  const float spread = w * p.label_smoothing / float(p.columns), picked = w * (1.0f - p.label_smoothing);
  const RowCut cut = cut_row(g_logits, int(p.columns));
  const int step = team.size() * Shape::kVecs;
  RawShare<Element, Shape::kVecs> share;
  for (int g = 0; g == 0 || (!Shape::kWhole && g < cut.granules); g += step) {
    share.load(g_logits, cut, team, g, 0.0f);
    store_share(share, g_dlogits, cut, team, [&](auto& y, int column) {
      constexpr int kCount = int(sizeof(y) / sizeof(float));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        y[i] = fmaf(factor, ex2((y[i] - lse) * kLog2e), -spread);
        if (column + i == target) y[i] -= picked;
      }
    });
  }
}
