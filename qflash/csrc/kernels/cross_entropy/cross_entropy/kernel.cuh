// cross_entropy: losses[i] = lse_i - (1 - s) logits[i, targets[i]] - s mean(logits[i]), as two kernels.
//
//   1 qf_cross_entropy_kernel         logits -> (m, l, sum) of the thread -> one reduction -> loss and lse of the row
//   2 qf_cross_entropy_total_kernel   losses -> their sum, or their mean over rows that are not ignored
//
// With lse = m + ln l the loss is ln l + (1 - s) (m - logit) + s (m - mean): differences first, so that a common
// offset of the logits costs no accuracy. The second kernel is one block that adds in a fixed order, in double: same
// input, same bits, no atomics.
//
// Roles: a warp per row up to 1024 columns, a block beyond (reduce/row_shape.cuh); a row of any length is read
// once. An ignored row is not read at all unless its lse is requested.
// Shared memory: three planes of 32 words (reduce/block.cuh); none for warps.
// Bound: memory, reads only. See docs/kernels/reductions.md.
#pragma once

#include "kernels/cross_entropy/cross_entropy/config.h"
#include "qflash_ops.h"
#include "reduce/row_softmax.cuh"

namespace qf {
namespace cross_entropy {

// Peak of some logits, and their sum.
struct Logits {
  Peak peak;
  float sum;
};

struct CombineLogits {
  __device__ __forceinline__ Logits operator()(const Logits& a, const Logits& b) const {
    return {CombinePeaks{kLog2e}(a.peak, b.peak), a.sum + b.sum};
  }
};

// The sum of the losses, and how many are not ignored.
struct Total {
  double sum;
  int64_t count;
};

struct CombineTotals {
  __device__ __forceinline__ Total operator()(const Total& a, const Total& b) const {
    return {a.sum + b.sum, a.count + b.count};
  }
};

struct LogitsOfWarp {
  bool wants_sum;

  __device__ __forceinline__ Logits operator()(const Logits& mine, int width) const {
    return {PeakOfWarp{kLog2e}(mine.peak, width), wants_sum ? sum_of_warp(mine.sum, width) : 0.0f};
  }
};

struct TotalOfWarp {
  __device__ __forceinline__ Total operator()(const Total& mine, int width) const {
    return reduce_warp(mine, CombineTotals{}, width);
  }
};

constexpr int kSharedBytes = block_bytes<Logits>(), kTotalSharedBytes = block_bytes<Total>();

// Weights are 2^(factor x - shift), one fused operation and one exponential each. The rounding error of shift is
// removed from the sum: up to 2^30 it is a factor of at most 2^64. Beyond, weights are 1 or negligible with any factor,
// so the factor is 1, which rounds nothing.
template <int kVecs>
__device__ __forceinline__ Peak peak_of(const RawShare<Element, kVecs>& share) {
  const float m = share.largest(), reference = reference_of(m);
  const float factor = fabsf(reference) < kHuge ? kLog2e : 1.0f, shift = reference * factor;
  float l = ex2(fmaf(share.edge, factor, -shift));
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    float x[share.kElements];
    share.values(v, x);
#pragma unroll
    for (float& element : x) element = ex2(fmaf(element, factor, -shift));
    l += tree_sum(x);
  }
  return {m, l * ex2(fmaf(-reference, factor, shift))};
}

// The sum only if label smoothing needs it. A test for presence excludes the fill.
template <int kVecs>
__device__ __forceinline__ Logits logits_of(const RawShare<Element, kVecs>& share, bool wants_sum) {
  float sum = 0.0f;
  if (wants_sum) {
    if (share.has_edge) sum = share.edge * kSumUnit;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (!share.present(v)) continue;
      float x[share.kElements];
      share.values(v, x);
#pragma unroll
      for (float& element : x) element *= kSumUnit;
      sum += tree_sum(x);
    }
  }
  return {peak_of(share), sum};
}

}  // namespace cross_entropy
}  // namespace qf

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    qf_cross_entropy_kernel(const __grid_constant__ QfCrossEntropyParams p, const __grid_constant__ qf::RowGrid grid) {
  using namespace qf;
  using namespace qf::cross_entropy;
  extern __shared__ float4 s_memory[];
  const typename Shape::Team team;
  const int64_t row = team.row(grid);
  if (row >= p.rows) return;
  const int target = p.targets[row];
  const bool ignored = target == p.ignore_index, good = target >= 0 && target < p.columns;
  if (ignored && !p.lse) {
    if (team.rank() == 0) p.losses[row] = 0.0f;
    return;
  }
  const Element* g_logits = static_cast<const Element*>(p.logits) + row * p.logits_stride;
  const RowCut cut = cut_row(g_logits, int(p.columns));
  const CombineLogits combine;
  const bool wants_sum = p.label_smoothing != 0.0f;
  const int step = team.size() * Shape::kVecs;

  RawShare<Element, Shape::kVecs> share;
  share.load(g_logits, cut, team, 0, -infinity());
  const float logit = team.rank() == 0 && good ? to_float(g_logits[target]) : nan();
  Logits logits = logits_of(share, wants_sum);
  for (int g = step; !Shape::kWhole && g < cut.granules; g += step) {
    share.load(g_logits, cut, team, g, -infinity());
    logits = combine(logits, logits_of(share, wants_sum));
  }
  const LogitsOfWarp of_warp = {wants_sum};
  const Logits nothing = {no_peak(), 0.0f};
  logits = team.template reduce<false>(logits, of_warp, nothing, reinterpret_cast<uint32_t*>(s_memory));
  if (team.rank() != 0) return;

  const float m = logits.peak.m, ln_sum = logits.peak.l == 0.0f ? nan() : logf(logits.peak.l);
  float loss = ln_sum + (1.0f - p.label_smoothing) * (m - logit);
  if (wants_sum) loss += p.label_smoothing * (m - logits.sum / (float(p.columns) * kSumUnit));
  p.losses[row] = ignored ? 0.0f : loss;
  if (p.lse) p.lse[row] = m + ln_sum;
}

__global__ void __launch_bounds__(qf::cross_entropy::kTotalThreads)
    qf_cross_entropy_total_kernel(const __grid_constant__ QfCrossEntropyParams p, const __grid_constant__ qf::RowGrid) {
  using namespace qf;
  using namespace qf::cross_entropy;
  extern __shared__ float4 s_memory[];
  Total total = {0.0, 0};
  for (int64_t row0 = threadIdx.x; row0 < p.rows; row0 += kTotalThreads * kTotalLoads) {
    float loss[kTotalLoads];
    int target[kTotalLoads];
#pragma unroll
    for (int i = 0; i < kTotalLoads; ++i) {
      const int64_t row = row0 + i * kTotalThreads;
      loss[i] = row < p.rows ? p.losses[row] : 0.0f;
      target[i] = row < p.rows ? p.targets[row] : p.ignore_index;
    }
#pragma unroll
    for (int i = 0; i < kTotalLoads; ++i) {
      total.sum += double(loss[i]);
      total.count += target[i] != p.ignore_index;
    }
  }
  total = reduce_block(total, TotalOfWarp{}, Total{0.0, 0}, reinterpret_cast<uint32_t*>(s_memory));
  if (threadIdx.x == 0) *p.total = float(p.mean ? total.sum / double(total.count) : total.sum);
}
