// Operand fragments and accumulators of a warp, in the register layout of mma.sync.
#pragma once

#include "common/element_types.h"
#include "gemm/mma/config.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace qf {
namespace gemm {

// C += A B, 16 x 32 bytes by 32 bytes x 8. On Turing, two or four smaller MMAs do the same on the same registers.
template <int kArch>
__device__ __forceinline__ void mma(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int8_t) {
  if constexpr (kArch >= 80) {
    mma_m16n8k32_s8(c, a, b0, b1);
  } else {
    mma_m8n8k16_s8(c[0], c[1], a[0], b0);
    mma_m8n8k16_s8(c[2], c[3], a[1], b0);
    mma_m8n8k16_s8(c[0], c[1], a[2], b1);
    mma_m8n8k16_s8(c[2], c[3], a[3], b1);
  }
}
template <int kArch>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F16) {
  if constexpr (kArch >= 80) {
    mma_m16n8k16_f16(c, a, b0, b1);
  } else {
    mma_m16n8k8_f16(c, a[0], a[1], b0);
    mma_m16n8k8_f16(c, a[2], a[3], b1);
  }
}
template <int kArch>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BF16) {
  static_assert(kArch >= 80, "Turing's tensor cores have no bfloat16");
  mma_m16n8k16_bf16(c, a, b0, b1);
}

// A warp's operands for a quarter of a step; one ldmatrix loads sixteen rows (of b: columns) of 32 bytes. Where k runs
// down the tile, ldmatrix.trans loads the same four 8 x 8 matrices.
template <class Shape, bool kADown, bool kBDown>
struct Fragments {
  static constexpr int kRowTiles = Shape::kWarpM / 16, kColumnPairs = kWarpN / 16;
  uint32_t a[kRowTiles][4];     // rows 0..7 and 8..15 of bytes 0..15, then of bytes 16..31
  uint32_t b[kColumnPairs][4];  // bytes 0..15 and 16..31 of columns 0..7, then of columns 8..15

  __device__ __forceinline__ void load(const char* s_stage, int quarter, unsigned s_a, unsigned s_b) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) load_one<kADown>(a[i], s_stage, s_a, i, quarter);
#pragma unroll
    for (int j = 0; j < kColumnPairs; ++j) load_one<kBDown>(b[j], s_stage, s_b, j, quarter);
  }

  // Offsets in a stage of the rows that this lane addresses for ldmatrix: first sixteen rows, first quarter.
  __device__ static __forceinline__ unsigned first_of_a(int warp, int lane) {
    const unsigned row = warp % Shape::kWarpsM * Shape::kWarpM;
    if constexpr (kADown)
      return row / 64 * 64 * kStepBytes + swizzled(lane % 8 + lane / 16 * 8, row % 64 / 8 + lane / 8 % 2);
    return swizzled(row + lane % 16, lane / 16);
  }
  __device__ static __forceinline__ unsigned first_of_b(int warp, int lane) {
    const unsigned column = warp / Shape::kWarpsM * kWarpN, s_tile = Shape::kBlockM * kStepBytes;
    if constexpr (kBDown) return s_tile + column * kStepBytes + swizzled(lane % 16, lane / 16);
    return s_tile + swizzled(column + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

 private:
  template <bool kDown>
  __device__ static __forceinline__ void load_one(uint32_t (&r)[4], const char* s_stage, unsigned s_first, int tile,
                                                  int quarter) {
    if constexpr (kDown)
      ldmatrix_x4_trans(r, s_stage + swizzled_further(s_first, quarter, tile));
    else
      ldmatrix_x4(r, s_stage + swizzled_further(s_first, tile, quarter));
  }
};

template <class Config, class Shape>
struct Sums {
  typename Config::Sum c[Shape::kWarpM / 16][kWarpN / 8][4];

  template <class Fragments>
  __device__ __forceinline__ void add(const Fragments& f) {
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
      for (int i = 0; i < Shape::kWarpM / 16; ++i)
        mma<Config::kArch>(c[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1],
                           typename Config::Element{});
  }
};

}  // namespace gemm
}  // namespace qf
