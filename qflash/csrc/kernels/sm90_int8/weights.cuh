// A tile's weights as PV multiplies them, in 16 bits or in E4M3.
#pragma once

#include "attn/sm90/softmax.cuh"
#include "ptx/add.cuh"
#include "ptx/cvt.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90 {

// Of this lane's weights, before they are rounded, for every group of keys that shares a scale.
__device__ __forceinline__ void sum_weights(TileSums (&sums)[kParts], const float (&S)[1][kNTiles][4]) {
  constexpr int kRun = kNTiles / kParts;
#pragma unroll
  for (int c = 0; c < kParts; ++c) {
    float sum[4] = {};
#pragma unroll
    for (int j = c * kRun; j < (c + 1) * kRun; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += S[0][j][e];
    sums[c] = {{sum[0] + sum[1], sum[2] + sum[3]}};
  }
}

template <bool kFp8>
struct Weights;

template <>
struct Weights<false> {
  using Values = AlongColumns<VTile>;
  // A lane's weights of a row and tile may add up to this before the row's reference must move: float16 holds it.
  static constexpr float kMost = 16384.0f;

  uint32_t a[kBlockN / 16][4];

  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) weights_of(a[i], S, i);
  }
  __device__ __forceinline__ void add_to(float (&)[2], const float (&)[kParts]) const {}  // sums before rounding do
  __device__ __forceinline__ void multiply(float (&O)[kOTiles][4], const Values& v) const {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) Wgmma<Element, kHeadDim>::template multiply<true>(O, a[i], v.step(i));
  }
};

template <>
struct Weights<true> {
  using Values = AlongRows<VTile>;
  static constexpr float kMost = 440.0f;  // E4M3 ends at 448: below this none was cut off

  uint32_t a[kBlockN / 32][4];

  // Words of four keys each: two of one block of 8 and two of the next, which is how V's keys are ordered.
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 32; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int j = 4 * i + r / 2 * 2, e = r % 2 * 2;
        a[i][r] = cvt_rn_e4m3x4_f32(S[0][j][e], S[0][j][e + 1], S[0][j + 1][e], S[0][j + 1][e + 1]);
      }
  }
  // l += factor * the weights as they are multiplied: to divide by these keeps rows averages of V however coarse the
  // rounding. In float16, eight at a time: what that loses is nothing beside what E4M3 lost.
  __device__ __forceinline__ void add_to(float (&l)[2], const float (&factors)[kParts]) const {
    constexpr int kRun = kBlockN / 32 / kParts;
#pragma unroll
    for (int c = 0; c < kParts; ++c) {
      uint32_t pairs[2][2];  // of a row's keys: the first and the second of each block of 8
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          uint32_t more[2];
          cvt_rn_f16x4_e4m3x4(more, a[c * kRun + i][r]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t& sum = pairs[r % 2][half];
            sum = i == 0 && r < 2 ? more[half] : add_f16x2(sum, more[half]);
          }
        }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = add_f16x2(pairs[h][0], pairs[h][1]);
        l[h] = fmaf(cvt_f32_f16(uint16_t(pair)) + cvt_f32_f16(uint16_t(pair >> 16)), factors[c], l[h]);
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&O)[kOTiles][4], const Values& v) const {
#pragma unroll
    for (int i = 0; i < kBlockN / 32; ++i) WgmmaE4m3<kHeadDim>::multiply(O, a[i], v.step(i));
  }
};

}  // namespace sm90
}  // namespace qf
