// A tile's weights as PV multiplies them, in 16 bits or in E4M3.
#pragma once

#include "attn/wgmma/softmax.cuh"
#include "ptx/cvt.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90 {

// Of this lane's weights, before they are rounded.
__device__ __forceinline__ TileSums sum_of(const float (&S)[1][kNTiles][4]) {
  float sum[4] = {};
#pragma unroll
  for (int j = 0; j < kNTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += S[0][j][e];
  return {{sum[0] + sum[1], sum[2] + sum[3]}};
}

// One of a lane's weights, as S has them.
struct Lot {
  int j, e;
};

template <bool kFp8>
struct Weights;

template <>
struct Weights<false> {
  using Values = AlongColumns<VTile>;
  // A lane's weights of a row and tile may add up to this before the row's reference must move: float16 holds it.
  static constexpr float kMost = 16384.0f;

  static constexpr int kWords = kBlockN / 4, kPerWord = 2;

  uint32_t a[kBlockN / 16][4];

  __device__ static __forceinline__ constexpr Lot lot(int word, int i) {
    return {word / 4 * 2 + word % 4 / 2, word % 2 * 2 + i};
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4], int word) {
    const Lot first = lot(word, 0);
    a[word / 4][word % 4] = Tensor::pair(S[0][first.j][first.e], S[0][first.j][first.e + 1]);
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) round(S, word);
  }
  __device__ __forceinline__ bool too_large() const { return false; }  // sums before rounding tell
  __device__ __forceinline__ void multiply(float (&O)[kOTiles][4], float (&)[1][4], const Values& v,
                                           const AlongRows<OnesTile>&) const {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) Wgmma<Element, kHeadDim>::template multiply<true>(O, a[i], v.step(i));
  }
};

template <>
struct Weights<true> {
  using Values = AlongRows<VTile>;
  static constexpr float kMost = 256.0f;  // E4M3 ends at 448: below this none was cut off

  static constexpr int kWords = kBlockN / 8, kPerWord = 4;

  uint32_t a[kBlockN / 32][4];

  // Words of four keys each: two of one block of 8 and two of the next, which is how V's keys are ordered.
  __device__ static __forceinline__ constexpr Lot lot(int word, int i) {
    return {word / 4 * 4 + word % 4 / 2 * 2 + i / 2, word % 2 * 2 + i % 2};
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4], int word) {
    const auto weight = [&](int i) { return S[0][lot(word, i).j][lot(word, i).e]; };
    a[word / 4][word % 4] = cvt_rn_e4m3x4_f32(weight(0), weight(1), weight(2), weight(3));
  }
  __device__ __forceinline__ void round(const float (&S)[1][kNTiles][4]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) round(S, word);
  }
  // Is one of them kMost or more, or NaN? Codes from 0x78 on: eight more have the sign's bit.
  __device__ __forceinline__ bool too_large() const {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < kBlockN / 32; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) signs |= a[i][r] + 0x08080808u;
    return (signs & 0x80808080u) != 0;
  }
  // O += P V, and sums = P's rows added up: to divide by these keeps rows averages of V however coarse the rounding.
  // The tensor cores lose what is small beside the sum so far, so every 32 keys have a sum, that is columns, of their
  // own.
  __device__ __forceinline__ void multiply(float (&O)[kOTiles][4], float (&sums)[1][4], const Values& v,
                                           const AlongRows<OnesTile>& ones) const {
#pragma unroll
    for (int i = 0; i < kBlockN / 32; ++i) {
      WgmmaE4m3<kHeadDim>::multiply(O, a[i], v.step(i));
      WgmmaE4m3<8>::multiply(sums, a[i], ones.step(i), i > 0);
    }
  }
};

}  // namespace sm90
}  // namespace qf
