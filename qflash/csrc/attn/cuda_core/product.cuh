// The two matrix products on CUDA cores, register-blocked: operands stream from shared memory 16 bytes at a time,
// accumulators stay in registers. smem/lanes.cuh defines which lane has which elements; kRows = 8 rows per lane. Q and
// P are float32; K and V may be in shared memory in a 16-bit type and are then converted as they are read.
#pragma once

#include "attn/mask.cuh"
#include "common/elements.cuh"
#include "smem/lanes.cuh"

namespace qf {

constexpr int kRows = 8;

// S[r][j] += sum over d of Q[row r][d] K[column j][d], d in 0 .. kDepth-1.
// s_q points at the lane's first row (stride kLanesY * kQStride to the next), s_k at its first column.
// Per 4 channels: 8 + kCols 16-byte loads for 32 kCols FMA; the shorter side is held in registers, the other streams.
template <int X, int kCols, int kDepth, int kQStride, int kKStride, int kUnroll, class Element>
__device__ __forceinline__ void qk_product(float (&S)[kRows][kCols], const float* s_q, const Element* s_k) {
  constexpr int kHeld = kCols < kRows ? kCols : kRows, kStreamed = kCols < kRows ? kRows : kCols;
  constexpr bool kHoldK = kCols < kRows;
  constexpr int kQStep = Lanes<X>::kLanesY * kQStride, kKStep = X * kKStride;
#pragma unroll kUnroll
  for (int d = 0; d < kDepth; d += 4) {
    float4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = kHoldK ? read4(s_k + i * kKStep + d) : read4(s_q + i * kQStep + d);
#pragma unroll
    for (int o = 0; o < kStreamed; ++o) {
      const float4 other = kHoldK ? read4(s_q + o * kQStep + d) : read4(s_k + o * kKStep + d);
      const auto score = [&](int i) -> float& { return kHoldK ? S[o][i] : S[i][o]; };
#pragma unroll
      for (int i = 0; i < kHeld; ++i) score(i) = fmaf(held[i].x, other.x, score(i));
#pragma unroll
      for (int i = 0; i < kHeld; ++i) score(i) = fmaf(held[i].y, other.y, score(i));
#pragma unroll
      for (int i = 0; i < kHeld; ++i) score(i) = fmaf(held[i].z, other.z, score(i));
#pragma unroll
      for (int i = 0; i < kHeld; ++i) score(i) = fmaf(held[i].w, other.w, score(i));
    }
  }
}

// The lane's part of O, element by element.
template <int kCols>
__device__ __forceinline__ void set_rows(float (&O)[kRows][kCols], float value) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) O[r][c] = value;
}

template <int kCols>
__device__ __forceinline__ void add_rows(float (&O)[kRows][kCols], const float (&sum)[kRows][kCols]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) O[r][c] += sum[r][c];
}

// Sets the scores of keys that a row does not see to -inf; `mask` counts from the key of S[.][0].
template <int X, int kCols>
__device__ __forceinline__ void mask_scores(float (&S)[kRows][kCols], const TileMask<Lanes<X>::kLanesY>& mask) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int begin = mask.begin(r), end = mask.end(r);
#pragma unroll
    for (int j = 0; j < kCols; ++j)
      if (j * X < begin || j * X >= end) S[r][j] = -infinity();
  }
}

// Stores P to shared memory; s_p points at the lane's first row and column. Lanes of the same warp read it.
template <int X, int kStride, int kCols>
__device__ __forceinline__ void store_weights(float* s_p, const float (&P)[kRows][kCols]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kCols; ++j) s_p[r * Lanes<X>::kLanesY * kStride + j * X] = P[r][j];
}

// kCount weights of one row, read at once.
template <int kCount>
struct Weights;
template <>
struct Weights<4> {
  float4 p;
  __device__ __forceinline__ float operator[](int e) const { return e == 0 ? p.x : e == 1 ? p.y : e == 2 ? p.z : p.w; }
};
template <>
struct Weights<2> {
  float2 p;
  __device__ __forceinline__ float operator[](int e) const { return e == 0 ? p.x : p.y; }
};

// Every row sees every key.
struct AllVisible {
  __device__ __forceinline__ bool operator()(int, int) const { return true; }
};

// O[r] += sum over n of P[row r][n] V[n], n in 0 .. kDepth-1, for kVecs groups of 4 columns per lane.
// `visible(r, n)` false leaves V[n] out of row r altogether: 0 times NaN or infinity would not be 0.
// Per 4 keys: 8 + 4 kVecs 16-byte loads for 128 kVecs FMA; wide rows take their weights two at a time to save
// registers.
template <int X, int kVecs, int kDepth, int kPStride, int kVStride, class Element, class Visible>
__device__ __forceinline__ void pv_product(float (&O)[kRows][4 * kVecs], const float* s_p, const Element* s_v,
                                           Visible visible) {
  constexpr int kAtOnce = kVecs > 2 ? 2 : 4;
#pragma unroll 1
  for (int n = 0; n < kDepth; n += kAtOnce) {
    Weights<kAtOnce> p[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      p[r] = *reinterpret_cast<const Weights<kAtOnce>*>(s_p + r * Lanes<X>::kLanesY * kPStride + n);
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
        const float4 v = read4(s_v + (n + e) * kVStride + c * 4 * X);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (!visible(r, n + e)) continue;
          O[r][4 * c + 0] = fmaf(p[r][e], v.x, O[r][4 * c + 0]);
          O[r][4 * c + 1] = fmaf(p[r][e], v.y, O[r][4 * c + 1]);
          O[r][4 * c + 2] = fmaf(p[r][e], v.z, O[r][4 * c + 2]);
          O[r][4 * c + 3] = fmaf(p[r][e], v.w, O[r][4 * c + 3]);
        }
      }
    }
  }
}

}  // namespace qf
