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
// and does not end, and of the unit that it goes on with.
struct Partials {
  float *begun, *continued;  // [block][row][head_dim + 4]
  int rows, head_dim;

  static int64_t floats(int64_t blocks, int rows, int head_dim) { return blocks * rows * (head_dim + 4); }
  __device__ __forceinline__ int row_floats() const { return head_dim + 4; }
  __device__ __forceinline__ int64_t place(int block, int row) const {
    return int64_t(block * rows + row) * row_floats();
  }
  __device__ __forceinline__ void store(const Part& part, int row, int d, const Merged& x) const {
    float* const g_row = (part.index == 0 ? begun : continued) + place(part.block(part.index), row);
    *reinterpret_cast<float4*>(g_row + d) = x.o;
    if (d == 0) *reinterpret_cast<RowSums*>(g_row + head_dim) = x.sums();
  }
  // All parts of a row, in the order of their keys. kAtOnce: loads under way.
  template <int kAtOnce>
  __device__ __forceinline__ Merged merged(const Part& part, int row, int d) const {
    Merged all;
    const float* g_row = begun + place(part.first_block, row);
    const float* g_next = continued + place(part.block(1), row);
    const int64_t apart = int64_t(part.apart * rows) * row_floats();
#pragma unroll 1
    for (int left = part.parts; left > 0; left -= kAtOnce) {
      float4 o[kAtOnce];
      RowSums sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sums[i] = {-infinity(), 0.0f, 0.0f, 0.0f};
        o[i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i < left) sums[i] = load_sums(g_row), o[i] = load(g_row + d);
        g_row = g_next, g_next += apart;
      }
      all.add(sums, o);
    }
    return all;
  }

 private:
  // From L2: other blocks wrote it.
  __device__ static __forceinline__ float4 load(const float* g_four) {
    return __ldcg(reinterpret_cast<const float4*>(g_four));
  }
  __device__ __forceinline__ RowSums load_sums(const float* g_row) const {
    const float4 x = load(g_row + head_dim);
    return {x.x, x.y, x.z, 0.0f};
  }
};

}  // namespace decode
}  // namespace qf
