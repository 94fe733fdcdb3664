// O from the registers of the CUDA-core kernels to `out`: at the end, divided by the sum of the weights, and before
// that whenever a float32 kernel folds its accumulators.
//
// A float32 sum of n terms loses about sqrt(n) / 2 units in the last place. After kFoldKeys keys such a kernel adds its
// accumulators to the values in `out` and starts afresh, which bounds the error to that of kFoldKeys keys. The 16-bit
// types round their result far more coarsely and never fold.
#pragma once

#include "attn/cuda_core/product.cuh"
#include "attn/cuda_core/softmax.cuh"
#include "attn/mask.cuh"
#include "attn/sinks.cuh"
#include "attn/tile_load.cuh"

namespace qf {

constexpr int kFoldKeys = 1024;

// One head of one sequence of out and lse.
template <class Element>
struct OutRows {
  Element* g_head;  // row 0, channel 0
  int64_t stride_t;
  float* g_lse;  // row 0; null: not requested
  float sink;    // of the head
  int head_dim;
  bool vector;  // store4's condition holds for every row

  __device__ __forceinline__ OutRows(const QfAttnParams& p, int b, int64_t row0, int h, bool vectorises)
      : g_head(static_cast<Element*>(p.out.data) + b * p.out.stride_b + row0 * p.out.stride_t + h * p.out.stride_h),
        stride_t(p.out.stride_t),
        g_lse(p.lse ? p.lse + b * p.lse_stride_b + h * p.lse_stride_h + row0 : nullptr),
        sink(sink_of(p, h)),
        head_dim(p.head_dim),
        vector(vectorises) {}
};

// Adds O to what earlier folds wrote to out (`folded`), and clears it; when `last`, divides by the sum of the weights
// and writes lse. The lane is at column x of rows row0, row0 + kLanesY, ..; row r has its maximum at m[r * kMaxStep],
// the maximum of the last fold at s_fold[r * kLanesY], the lane's sum at l[r * kSumStep] (m and l: shared memory or
// registers). A thread reads back from out only what it wrote itself.
template <int X, int kVecs, int kMaxStep, int kSumStep, bool kFolds, class Element>
__device__ __forceinline__ void fold_rows(float (&O)[kRows][4 * kVecs], const float* m, float* s_fold, const float* l,
                                          const OutRows<Element>& out, const Mask& mask, int x, int row0, bool folded,
                                          bool last) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = row0 + r * Lanes<X>::kLanesY;
    const float top = m[r * kMaxStep], sum = sum_across_x<X>(l[r * kSumStep]);
    const KeyRange keys = mask.visible(row);
    const bool empty = keys.begin == keys.end;
    const WithSink with(top, out.sink, 0.0f);
    const float factor = last ? with.keys / with.total(sum) : 1.0f;
    const float past = kFolds && folded ? ex2(s_fold[r * Lanes<X>::kLanesY] - reference_of(top)) : 0.0f;
    __syncwarp();  // every lane has read s_fold
    if (kFolds && x == 0) s_fold[r * Lanes<X>::kLanesY] = top;
    if (row >= mask.len_q) continue;
    Element* const g_row = out.g_head + row * out.stride_t;
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
      const int d = 4 * (x + c * X);
      float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (kFolds && folded) before = to_float4(load4(g_row, d, out.head_dim, out.vector), g_row);
      const float old[4] = {before.x, before.y, before.z, before.w};
      float sums[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[e] = empty ? 0.0f : fmaf(old[e], past, O[r][4 * c + e]) * factor;
        O[r][4 * c + e] = 0.0f;
      }
      store4(g_row, d, out.head_dim, out.vector, sums);
    }
    if (last && out.g_lse && x == 0) out.g_lse[row] = empty ? out.sink : with.lse(sum);
  }
}

}  // namespace qf
