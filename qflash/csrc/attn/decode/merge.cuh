// What becomes of the sums of several warps, and of several blocks, over different keys of the same rows.
//
// A part is (m, l, exact, O) with weights 2^(score - m). m is an integer, so that moving to another reference scales by
// a power of two: the result depends on the order of the parts alone, and that is the order of the keys.
#pragma once

#include "attn/decode/share.cuh"
#include "attn/mma/softmax.cuh"

namespace qf {
namespace decode {

// m: reference of the weights; l: sum of the weights as they were multiplied; exact: of the weights themselves.
struct alignas(16) RowSums {
  float m, l, exact, unused;
};

// Four channels of one row.
struct Merged {
  float m = -infinity(), l = 0.0f, exact = 0.0f;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

  // Further parts, in order. All weights are known before the first is used: one after another would be slower.
  template <int kParts>
  __device__ __forceinline__ void add(const RowSums (&sums)[kParts], const float4 (&parts)[kParts]) {
    float top = m;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = fmaxf(top, sums[i].m);
    const float reference = reference_of(top), own = ex2(m - reference);
    float weights[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) weights[i] = ex2(sums[i].m - reference);
    m = top;
    l *= own, exact *= own;
    o.x *= own, o.y *= own, o.z *= own, o.w *= own;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      l = fmaf(sums[i].l, weights[i], l);
      exact = fmaf(sums[i].exact, weights[i], exact);
      o.x = fmaf(parts[i].x, weights[i], o.x), o.y = fmaf(parts[i].y, weights[i], o.y);
      o.z = fmaf(parts[i].z, weights[i], o.z), o.w = fmaf(parts[i].w, weights[i], o.w);
    }
  }
  __device__ __forceinline__ RowSums sums() const { return {m, l, exact, 0.0f}; }
};

// Parts in global memory: rows of head_dim sums and a RowSums. A block leaves at most two: of the unit that it begins
// and does not end (1), and of the unit that it goes on with (0).
struct Partials {
  float* memory;
  int rows, head_dim;

  static __host__ __device__ int64_t floats(int rows, int head_dim) { return int64_t(rows) * (head_dim + 4); }
  static __host__ __device__ int64_t bytes(int64_t blocks, int rows, int head_dim) {
    return blocks * 2 * floats(rows, head_dim) * int64_t(sizeof(float));
  }
  // Row `row` of the unit's part `index`.
  __device__ __forceinline__ float* row(const Part& part, int index, int row) const {
    const int64_t slot = int64_t(part.block(index)) * 2 + (index == 0);
    return memory + slot * floats(rows, head_dim) + int64_t(row) * (head_dim + 4);
  }
  __device__ __forceinline__ void store(const Part& part, int row, int d, const Merged& x) const {
    float* const g_row = this->row(part, part.index, row);
    *reinterpret_cast<float4*>(g_row + d) = x.o;
    if (d == 0) *reinterpret_cast<RowSums*>(g_row + head_dim) = x.sums();
  }
  // All parts of a row, in the order of their keys.
  __device__ __forceinline__ Merged merged(const Part& part, int row, int d) const {
    constexpr int kAtOnce = 16;  // loads under way
    Merged all;
    for (int first = 0; first < part.parts; first += kAtOnce) {
      float4 o[kAtOnce];
      RowSums sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float* const g_row = this->row(part, min(first + i, part.parts - 1), row);
        const float4 x = __ldcg(reinterpret_cast<const float4*>(g_row + head_dim));
        sums[i] = {first + i < part.parts ? x.x : -infinity(), x.y, x.z, 0.0f};
        o[i] = __ldcg(reinterpret_cast<const float4*>(g_row + d));
      }
      // A part that is not there weighs nothing; but 0 times infinity is NaN.
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i >= part.parts) sums[i].l = sums[i].exact = 0.0f, o[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      all.add(sums, o);
    }
    return all;
  }
};

}  // namespace decode
}  // namespace qf
