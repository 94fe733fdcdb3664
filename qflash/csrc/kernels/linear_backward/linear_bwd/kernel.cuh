// linear_bwd: the gradients of out = activation(h) + residual, h = x w + bias, as up to five launches.
//
//   1 qf_linear_bwd_slopes_kernel   dout, pre -> dh = dout activation'(pre), dresidual = dout, shares of dbias
//   2 qf_linear_bwd_totals_kernel   shares in the order of chunks, in double -> dbias, dup_bias
//   3 dx = dh w^T (+ du up^T)       kernels of gemm_mma or of gemm_tiled, or in `sm90_linear_bwd` of sm90_gemm, on
//   4 dw = x^T dh                   operands with exchanged strides; for SwiGLU, dh and du are side by side, and dx is
//   5 dup = x^T du                  one product of twice the depth
//
// Without an activation dout is dh: nothing is stored between the passes, and the first is omitted if neither dbias nor
// dresidual is requested. There are no atomics: the order of summation depends on the shape alone.
//
// Roles of the first kernel: eight warps per block, lanes along columns, 16 bytes each.
// Shared memory: one number per warp and column; lanes read and write neighbouring words.
// Bound: memory for 1 and 2; that of the products for the others. See docs/kernels/linear_bwd.md.
#pragma once

#include "kernels/linear_backward/linear_bwd/config.h"
#include "qflash_ops.h"

namespace qf {
namespace linear_bwd {

// What the first kernel passes to the others.
struct Pass {
  Element* g_dh;    // [m][stride]; null where dout is dh
  int64_t stride;   // du begins half a row later
  int64_t columns;  // of dh, zeros past the last; du has as many
  float* g_shares;  // [chunks][of dh, of du][n]
  int64_t chunks, tiles;
  bool sums;    // are they requested?
  bool vector;  // rows of all arrays are aligned to 16 bytes
};

}  // namespace linear_bwd
}  // namespace qf

// Block i has columns of tile i % tiles and rows of chunk i / tiles.
template <int kActivation>
__global__ void __launch_bounds__(qf::linear_bwd::kThreads)
    qf_linear_bwd_slopes_kernel(const __grid_constant__ QfLinearBwdParams p,
                                const __grid_constant__ qf::linear_bwd::Pass pass) {
  using namespace qf;
  using namespace qf::gemm;
  using namespace qf::linear_bwd;
  constexpr bool kGated = kActivation == QF_SWIGLU;
  constexpr int kCount = kLaneColumns;
  extern __shared__ float4 s_memory[];
  auto s_sums = reinterpret_cast<float (*)[kWarps][kTileColumns]>(s_memory);  // of dh, of du
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t chunk = blockIdx.x / pass.tiles, column0 = blockIdx.x % pass.tiles * kTileColumns;
  const int64_t begin = p.m * chunk / pass.chunks, end = p.m * (chunk + 1) / pass.chunks;
  const int64_t column = column0 + lane * kCount;
  const int inside = int(min(p.n - column, int64_t(kCount)));

  float of_h[kCount] = {}, of_u[kCount] = {};
  for (int64_t row = begin + warp; column < pass.columns && row < end; row += kWarps) {
    float dout[kCount], h[kCount] = {}, u[kCount] = {};
    load_values(dout, static_cast<const Element*>(p.dout) + row * p.dout_stride_m + column, pass.vector, inside);
    if constexpr (kActivation != QF_IDENTITY)
      load_values(h, static_cast<const Element*>(p.pre) + row * p.n + column, pass.vector, inside);
    if constexpr (kGated)
      load_values(u, static_cast<const Element*>(p.pre_up) + row * p.n + column, pass.vector, inside);
    if (p.dresidual) store_values(static_cast<Element*>(p.dresidual) + row * p.n + column, pass.vector, inside, dout);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const Slopes slope = slopes<kActivation>(h[j], u[j]);
      h[j] = dout[j] * slope.of_h;
      u[j] = dout[j] * slope.of_u;
      of_h[j] += h[j];
      of_u[j] += u[j];
    }
    if constexpr (kActivation != QF_IDENTITY) {
      Element* const g_dh = pass.g_dh + row * pass.stride + column;
      store_values(g_dh, true, kCount, h);
      if constexpr (kGated) store_values(g_dh + pass.stride / 2, true, kCount, u);
    }
  }
  if (!pass.sums) return;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    s_sums[0][warp][lane * kCount + j] = of_h[j];
    s_sums[1][warp][lane * kCount + j] = of_u[j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (kGated ? 2 : 1) * kTileColumns; i += kThreads) {
    const int which = i / kTileColumns, at = i % kTileColumns;
    if (column0 + at >= p.n) continue;
    float total = 0.0f;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) total += s_sums[which][other][at];
    pass.g_shares[(2 * chunk + which) * p.n + column0 + at] = total;
  }
}

// Block i has 32 columns of dbias if i is even, of dup_bias if it is odd.
__global__ void __launch_bounds__(qf::linear_bwd::kThreads)
    qf_linear_bwd_totals_kernel(const __grid_constant__ QfLinearBwdParams p,
                                const __grid_constant__ qf::linear_bwd::Pass pass) {
  using namespace qf;
  using namespace qf::linear_bwd;
  extern __shared__ float4 s_memory[];
  auto s_totals = reinterpret_cast<double (*)[32]>(s_memory);  // of each warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = blockIdx.x % 2;
  void* const g_total = which == 0 ? p.dbias : p.dup_bias;
  if (!g_total) return;
  const int64_t column = int64_t(blockIdx.x / 2) * 32 + lane;
  double total = 0.0;
  if (column < p.n)
    for (int64_t chunk = warp; chunk < pass.chunks; chunk += kWarps)
      total += double(pass.g_shares[(2 * chunk + which) * p.n + column]);
  s_totals[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || column >= p.n) return;
  total = 0.0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) total += s_totals[other][lane];
  if (p.bias_dtype == QF_F32)
    static_cast<float*>(g_total)[column] = float(total);
  else
    from_float(float(total), static_cast<Element*>(g_total)[column]);
}
