// layer_norm_bwd: with z = (x - mean) rstd and g = dout weight,
//   dx = rstd (g - rowmean(g) - z rowmean(g z)) + dmean / n - z drstd rstd^2 / n,
//   dweight = sum over rows of dout z,   dbias = sum over rows of dout,
// as three kernels.
//
//   1 qf_layer_norm_bwd_kernel         x, dout -> (sum z, sum g, sum g z) -> one reduction -> dx, and z's offset
//   2 qf_layer_norm_bwd_sums_kernel    64 columns of a chunk of rows -> their share of dweight and dbias
//   3 qf_layer_norm_bwd_totals_kernel  shares in the order of chunks, in double -> dweight, dbias
//
// The forward pass rounded the mean to a float, so z is off by one constant for the whole row. That is the mean of z,
// which should be 0; it is subtracted, and stored for the second kernel. So an offset of x costs no accuracy. There are
// no atomics: the order of summation depends on the shape alone.
//
// Roles: as softmax_bwd in the first kernel; in the others eight warps per block, lanes along columns.
// Shared memory: three planes of 32 words in the first kernel (reduce/block.cuh), one number per warp and column in
// the others; lanes read and write neighbouring words.
// Bound: memory. x and dout are read twice if dweight or dbias is requested. See docs/kernels/reductions.md.
#pragma once

#include "kernels/layer_norm_backward/layer_norm_bwd/config.h"
#include "qflash_ops.h"
#include "reduce/row_pair.cuh"
#include "reduce/states.cuh"

namespace qf {
namespace layer_norm_bwd {

template <bool kValue>
struct Known {
  static constexpr bool value = kValue;
};

struct Sums {
  float z, g, gz;
};

struct SumsOfWarp {
  __device__ __forceinline__ Sums operator()(const Sums& mine, int width) const {
    return {sum_of_warp(mine.z, width), sum_of_warp(mine.g, width), sum_of_warp(mine.gz, width)};
  }
};

constexpr int kSharedBytes = block_bytes<Sums>();
constexpr int kSumsSharedBytes = 2 * kSumWarps * kSumColumns * int(sizeof(float));
constexpr int kTotalsSharedBytes = kSumWarps * 32 * int(sizeof(double));

// z of a row from the rounded mean. Halves are subtracted, so that the difference of two floats cannot overflow.
struct Normalise {
  float half_mean, twice_rstd;

  __device__ __forceinline__ Normalise(float mean, float rstd) : half_mean(0.5f * mean), twice_rstd(2.0f * rstd) {}
  __device__ __forceinline__ float operator()(float x) const { return fmaf(x, 0.5f, -half_mean) * twice_rstd; }
};

// What the first kernel passes to the second, and the second to the third.
struct Workspace {
  float* g_offsets;  // [rows]: the mean of z
  float* g_shares;   // [chunks][dweight, dbias][columns]

  __host__ __device__ explicit Workspace(const QfLayerNormBwdParams& p)
      : g_offsets(static_cast<float*>(p.workspace)), g_shares(g_offsets + p.rows) {}
  static int64_t bytes(const QfLayerNormBwdParams& p) {
    return p.sums == 0 ? 0 : (p.rows + 2 * chunks_of(p.rows) * p.columns) * int64_t(sizeof(float));
  }
};

// A compensated sum, which keeps what each addition rounds off.
struct LongSum {
  float sum = 0.0f, lost = 0.0f;

  __device__ __forceinline__ void add(float x) {
    float rest;
    two_sum(sum, x, sum, rest);
    lost += rest;
  }
  // The compensation of an infinite sum is nonfinite, and ignored.
  __device__ __forceinline__ float total() const { return lost - lost == 0.0f ? sum + lost : sum; }
};

}  // namespace layer_norm_bwd
}  // namespace qf

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    qf_layer_norm_bwd_kernel(const __grid_constant__ QfLayerNormBwdParams p, const __grid_constant__ qf::RowGrid grid) {
  using namespace qf;
  using namespace qf::layer_norm_bwd;
  extern __shared__ float4 s_memory[];
  const typename Shape::Team team;
  const int64_t row = team.row(grid);
  if (row >= p.rows) return;
  const Element* g_x = static_cast<const Element*>(p.x) + row * p.x_stride;
  const Element* g_dout = static_cast<const Element*>(p.dout) + row * p.dout_stride;
  const Element* g_weight = static_cast<const Element*>(p.weight);
  Element* g_dx = static_cast<Element*>(p.dx) + row * p.dx_stride;
  const RowCut cut = cut_row(g_x, int(p.columns));
  const bool aligned = g_weight && aligned_alike(g_weight, cut);
  const int step = team.size() * Shape::kVecs;
  const float rstd = p.rstd[row];
  const Normalise normalise(p.mean[row], rstd);

  RawShare<Element, Shape::kVecs> x, dout;
  Sums sums = {0.0f, 0.0f, 0.0f};
  const auto load = [&](int g) {
    x.load(g_x, cut, team, g, 0.0f);
    load_beside(dout, g_dout, cut, team, g);
  };
  // x becomes z and dout becomes g.
  const auto prepare = [&](auto is_aligned, auto& x, auto& y, int column) {
    constexpr int kCount = int(sizeof(x) / sizeof(float));
    float weight[kCount];
    load_columns<is_aligned.value>(g_weight, column, 1.0f, weight);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = normalise(x[i]);
      y[i] *= weight[i];
    }
  };
  const auto add = [&](auto is_aligned) {
    see_pair(x, dout, cut, team, [&](auto& x, auto& y, int column) {
      constexpr int kCount = int(sizeof(x) / sizeof(float));
      prepare(is_aligned, x, y, column);
      sums.z += tree_sum(x);
      sums.g += tree_sum(y);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= y[i];
      sums.gz += tree_sum(x);
    });
  };
  const auto add_share = [&] {
    if (aligned) {
      add(Known<true>{});
    } else {
      add(Known<false>{});
    }
  };
  load(0);
  add_share();
  for (int g = step; !Shape::kWhole && g < cut.granules; g += step) {
    load(g);
    add_share();
  }
  sums = team.reduce(sums, SumsOfWarp{}, Sums{0.0f, 0.0f, 0.0f}, reinterpret_cast<uint32_t*>(s_memory));

  const float count = float(p.columns), offset = sums.z / count, mean_g = sums.g / count;
  // A nonfinite gradient omits the correction, which may be 0 * inf.
  const float mean_gz = sums.gz / count - (mean_g - mean_g == 0.0f ? offset * mean_g : 0.0f);
  const float of_z = mean_gz + (p.drstd ? p.drstd[row] * rstd / count : 0.0f);
  const float of_mean = p.dmean ? p.dmean[row] / count : 0.0f;
  if (p.sums && team.rank() == 0) Workspace(p).g_offsets[row] = offset;
  const auto store = [&](auto is_aligned) {
    store_pair(x, dout, g_dx, cut, team, [&](auto& x, auto& y, int column) {
      constexpr int kCount = int(sizeof(x) / sizeof(float));
      prepare(is_aligned, x, y, column);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = fmaf(rstd, fmaf(offset - x[i], of_z, y[i] - mean_g), of_mean);
    });
  };
  const auto store_shares = [&] {
    if (aligned) {
      store(Known<true>{});
    } else {
      store(Known<false>{});
    }
  };
  if (Shape::kWhole) {
    store_shares();
  } else {
    for (int g = 0; g == 0 || g < cut.granules; g += step) {
      load(g);
      store_shares();
    }
  }
}

// Block i has columns of tile i % tiles and rows of chunk i / tiles.
__global__ void __launch_bounds__(32 * qf::layer_norm_bwd::kSumWarps)
    qf_layer_norm_bwd_sums_kernel(const __grid_constant__ QfLayerNormBwdParams p, int64_t first_block) {
  using namespace qf;
  using namespace qf::layer_norm_bwd;
  extern __shared__ float4 s_memory[];
  auto s_sums = reinterpret_cast<float (*)[kSumWarps][kSumColumns]>(s_memory);  // dweight's, dbias's
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t block = first_block + blockIdx.x, tiles = (p.columns + kSumColumns - 1) / kSumColumns;
  const int64_t chunk = block / tiles, column0 = block % tiles * kSumColumns, chunks = chunks_of(p.rows);
  const int64_t begin = p.rows * chunk / chunks, end = p.rows * (chunk + 1) / chunks;
  const Workspace workspace(p);

  LongSum of_weight[kLaneColumns], of_bias[kLaneColumns];
  for (int64_t row = begin + warp; row < end; row += kSumWarps) {
    const Element* g_x = static_cast<const Element*>(p.x) + row * p.x_stride;
    const Element* g_dout = static_cast<const Element*>(p.dout) + row * p.dout_stride;
    const Normalise normalise(p.mean[row], p.rstd[row]);
    const float offset = workspace.g_offsets[row];
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const int64_t column = column0 + lane + 32 * i;
      if (column >= p.columns) continue;
      const float g = to_float(g_dout[column]);
      of_weight[i].add(g * (normalise(to_float(g_x[column])) - offset));
      of_bias[i].add(g);
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    s_sums[0][warp][lane + 32 * i] = of_weight[i].total();
    s_sums[1][warp][lane + 32 * i] = of_bias[i].total();
  }
  __syncthreads();
  const int which = threadIdx.x / kSumColumns, column = threadIdx.x % kSumColumns;
  if (which >= 2 || column0 + column >= p.columns) return;
  float total = 0.0f;
#pragma unroll
  for (int other = 0; other < kSumWarps; ++other) total += s_sums[which][other][column];
  workspace.g_shares[(2 * chunk + which) * p.columns + column0 + column] = total;
}

// Block i has 32 columns of dweight if i is even, of dbias if it is odd.
__global__ void __launch_bounds__(32 * qf::layer_norm_bwd::kSumWarps)
    qf_layer_norm_bwd_totals_kernel(const __grid_constant__ QfLayerNormBwdParams p) {
  using namespace qf;
  using namespace qf::layer_norm_bwd;
  extern __shared__ float4 s_memory[];
  auto s_totals = reinterpret_cast<double (*)[32]>(s_memory);  // of each warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = blockIdx.x % 2;
  Element* g_total = static_cast<Element*>(which == 0 ? p.dweight : p.dbias);
  if (!g_total) return;
  const int64_t column = int64_t(blockIdx.x / 2) * 32 + lane, chunks = chunks_of(p.rows);
  double total = 0.0;
  if (column < p.columns)
    for (int64_t chunk = warp; chunk < chunks; chunk += kSumWarps)
      total += double(Workspace(p).g_shares[(2 * chunk + which) * p.columns + column]);
  s_totals[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || column >= p.columns) return;
  total = 0.0;
#pragma unroll
  for (int other = 0; other < kSumWarps; ++other) total += s_totals[other][lane];
  from_float(float(total), g_total[column]);
}
