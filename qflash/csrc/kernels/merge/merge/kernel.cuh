// merge: combines attention over some keys and over others into attention over both, row by row.
//
// A thread has four channels of a row and its neighbour the next four, so that a warp reads whole cache lines. Every
// thread of a row computes the weights from the two lse, which costs less than an exchange.
// Bound: memory, three rows and three numbers for each result row; a short call is bound by its launch.
#pragma once

#include "attn/cuda_core/softmax.cuh"
#include "kernels/merge/merge/config.h"
#include "ptx/griddepcontrol.cuh"
#include "qflash_ops.h"

namespace qf {
namespace merge {

// Which tensors are accessed four elements at a time.
struct Aligned {
  bool a, b, out;
};

// The factors of a row of a and of b, and their combined lse. Both are relative to the larger lse, so neither
// overflows; before normalization, the larger one's is 1 even if that lse is infinite.
struct RowWeights {
  float a, b, lse;

  __device__ __forceinline__ RowWeights(float a_lse, float b_lse) {
    const float top = a_lse > b_lse ? a_lse : b_lse;  // NaN in either reaches the sum through its weight
    a = a_lse == top ? 1.0f : ex2((a_lse - top) * kLog2e);
    b = b_lse == top ? 1.0f : ex2((b_lse - top) * kLog2e);
    const float sum = a + b;
    lse = top + logf(sum);
    a /= sum, b /= sum;
    if (b_lse == -infinity()) a = 1.0f, b = 0.0f, lse = a_lse;
    if (a_lse == -infinity()) a = 0.0f, b = b_lse == -infinity() ? 0.0f : 1.0f, lse = b_lse;
  }
};

// A row of weight 0 is not multiplied, because it may hold anything.
__device__ __forceinline__ void add_weighted(float (&sum)[4], const float4& x, float weight) {
  if (weight == 0.0f) return;
  sum[0] = fmaf(weight, x.x, sum[0]), sum[1] = fmaf(weight, x.y, sum[1]);
  sum[2] = fmaf(weight, x.z, sum[2]), sum[3] = fmaf(weight, x.w, sum[3]);
}

}  // namespace merge
}  // namespace qf

// ElementB: of b. quads: of a row, four channels each.
template <class ElementB>
__global__ void __launch_bounds__(qf::merge::kThreads)
    qf_merge_kernel(const __grid_constant__ QfMergeParams p, const unsigned quads, const unsigned count,
                    const qf::merge::Aligned aligned) {
  using namespace qf;
  using namespace qf::merge;
  wait_for_previous_grid();  // it wrote what is merged
  const unsigned i = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  if (i >= count) return;
  const unsigned row = i / quads, token = row / p.heads;
  const int d = int(i - row * quads) * 4, h = int(row - token * p.heads);
  const int b = int(token / p.length), t = int(token - unsigned(b) * p.length);
  const int64_t at = (int64_t(b) * p.heads + h) * p.length + t;
  const auto offset = [&](const QfTensor& x) { return b * x.stride_b + t * x.stride_t + h * x.stride_h; };
  const Element* const g_a = static_cast<const Element*>(p.a.data) + offset(p.a);
  const ElementB* const g_b = static_cast<const ElementB*>(p.b.data) + offset(p.b);
  const auto raw_a = load4(g_a, d, p.head_dim, aligned.a);
  const auto raw_b = load4(g_b, d, p.head_dim, aligned.b);
  const RowWeights weights(p.a_lse[b * p.a_lse_stride_b + h * p.a_lse_stride_h + t * p.a_lse_stride_t],
                           p.b_lse[b * p.b_lse_stride_b + h * p.b_lse_stride_h + t * p.b_lse_stride_t]);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  add_weighted(sum, to_float4(raw_a, g_a), weights.a);
  add_weighted(sum, to_float4(raw_b, g_b), weights.b);
  store4(static_cast<Element*>(p.out.data) + offset(p.out), d, p.head_dim, aligned.out, sum);
  if (d == 0) p.lse[at] = weights.lse;
}
