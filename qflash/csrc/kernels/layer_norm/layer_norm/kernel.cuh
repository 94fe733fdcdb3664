// layer_norm: out[i] = (x[i] - mean) / sqrt(variance + eps) * weight + bias for every row of a matrix.
//
//   row in registers   x -> moments of the thread -> one reduction -> out        DRAM: row read once, written once
//   longer rows        pieces of x -> moments -> one reduction -> pieces again   read twice, the second time mostly L2
//
// A thread sums its share relative to the mean of its first granule, so that a constant row has deviation exactly 0
// and an offset costs no accuracy; the tree combines (count, mean, squared deviations), with the mean in two floats
// (reduce/states.cuh).
//
// Roles: a warp per row up to 1024 or 2048 columns, a block beyond (reduce/row_shape.cuh). Registers: 128 bytes of x
// per thread.
// Shared memory: four planes of 32 words (reduce/block.cuh); none for warps.
// Caches: x bypasses L1, so that weight and bias, which every row uses, stay there.
// Bound: memory. See docs/kernels/reductions.md.
#pragma once

#include "kernels/layer_norm/layer_norm/config.h"
#include "qflash_ops.h"
#include "reduce/states.cuh"

namespace qf {
namespace layer_norm {

constexpr int kSharedBytes = block_bytes<Moments>();

template <bool kValue>
struct Known {
  static constexpr bool value = kValue;
};

// From sums of the differences d from the mean of the share's first granule. An outlier moves that mean only by a
// fraction of its distance, so the subtraction in sum d^2 - (sum d)^2 / n costs little accuracy.
template <int kVecs>
__device__ __forceinline__ Moments moments_of(const RawShare<Element, kVecs>& share) {
  constexpr int kElements = kGranule<Element>, kChains = 4;  // independent chains of additions
  float x[kElements];
  share.values(0, x);
  const float first = share.present(0) ? tree_sum(x) * (1.0f / kElements) : share.edge;
  const float count = float(share.count());
  float sums[kChains] = {}, squares[kChains] = {};
  if (share.has_edge) {
    sums[0] = share.edge - first;
    squares[0] = sums[0] * sums[0];
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (!share.present(v)) continue;
    share.values(v, x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float d = x[i] - first;
      sums[i % kChains] += d;
      squares[i % kChains] = fmaf(d, d, squares[i % kChains]);
    }
  }
  const float sum = tree_sum(sums), step = count == 0.0f ? 0.0f : sum * rcp(count);
  Moments moments = {count, 0.0f, 0.0f, fmaf(-step, sum, tree_sum(squares))};
  two_sum(first, step, moments.mean, moments.rest);
  return moments;
}

// The unit in which a row's moments are well inside the range of float32, judged by those in units of 1.
__device__ __forceinline__ float unit_for(const Moments& moments, float eps) {
  if (!(moments.m2 < infinity())) return kSmallUnit;
  const bool vanishes = moments.m2 < kLeastVariance * moments.count && eps < kLeastVariance;
  return vanishes && fabsf(moments.mean) < kMostNarrow ? kLargeUnit : 1.0f;
}

}  // namespace layer_norm
}  // namespace qf

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    qf_layer_norm_kernel(const __grid_constant__ QfRowsParams p, const __grid_constant__ qf::RowGrid grid) {
  using namespace qf;
  using namespace qf::layer_norm;
  extern __shared__ float4 s_memory[];
  const typename Shape::Team team;
  const int64_t row = team.row(grid);
  if (row >= p.rows) return;
  const Element* g_x = static_cast<const Element*>(p.x) + row * p.x_stride;
  Element* g_out = static_cast<Element*>(p.out) + row * p.out_stride;
  const RowCut cut = cut_row(g_x, int(p.columns));
  const CombineMoments combine;
  const int step = team.size() * Shape::kVecs;

  RawShare<Element, Shape::kVecs> share;
  Moments moments;
  float unit = 1.0f;
  const auto load = [&](int g) {
    share.load(g_x, cut, team, g, 0.0f);
    if (unit != 1.0f) share.scale(unit);
  };
  load(0);
  for (;;) {
    moments = moments_of(share);
    for (int g = step; !Shape::kWhole && g < cut.granules; g += step) {
      load(g);
      moments = combine(moments, moments_of(share));
    }
    moments = team.reduce(moments, MomentsOfWarp{}, no_moments(), reinterpret_cast<uint32_t*>(s_memory));
    // Once is enough except for rows that overflow or vanish, or have infinities or NaN: they get another unit.
    if (!kMayLeaveRange || unit != 1.0f) break;
    unit = unit_for(moments, p.eps);
    if (unit == 1.0f) break;
    team.meet();
    if (Shape::kWhole) {
      share.scale(unit);
    } else {
      load(0);
    }
  }

  const float variance = (moments.m2 < 0.0f ? 0.0f : moments.m2) / float(p.columns);
  const float rstd = 1.0f / sqrtf(variance + p.eps * unit * unit);
  if (team.rank() == 0) {
    // NaN if the row has nonfinite elements, whatever its mean would be.
    if (p.mean) p.mean[row] = (moments.mean + moments.m2 * 0.0f) / unit;
    if (p.rstd) p.rstd[row] = rstd * unit;
  }
  const Element* g_weight = static_cast<const Element*>(p.weight);
  const Element* g_bias = static_cast<const Element*>(p.bias);
  const float rest = -moments.rest * rstd;
  const bool aligned = aligned_alike(g_out, cut) && (!g_weight || aligned_alike(g_weight, cut)) &&
                       (!g_bias || aligned_alike(g_bias, cut));
  // The first case is the usual one, without tests per granule.
  const auto store = [&] {
    const auto finish = [&](auto is_aligned, auto& y, int column) {
      constexpr int kCount = int(sizeof(y) / sizeof(float));
      float weight[kCount], bias[kCount];
      load_columns<is_aligned.value>(g_weight, column, 1.0f, weight);
      load_columns<is_aligned.value>(g_bias, column, 0.0f, bias);
#pragma unroll
      for (int i = 0; i < kCount; ++i) y[i] = fmaf(fmaf(y[i] - moments.mean, rstd, rest), weight[i], bias[i]);
    };
    const auto finish_aligned = [&](auto& y, int column) { finish(Known<true>{}, y, column); };
    if (aligned && g_weight && g_bias) {
      store_share_at<true>(share, g_out, cut, team, finish_aligned);
    } else if (aligned) {
      store_share_at<true>(share, g_out, cut, team, finish_aligned);
    } else {
      store_share(share, g_out, cut, team, [&](auto& y, int column) { finish(Known<false>{}, y, column); });
    }
  };
  if (Shape::kWhole) {
    share.forget_values();
    store();
  } else {
    for (int g = 0; g == 0 || g < cut.granules; g += step) {
      load(g);
      store();
    }
  }
}
