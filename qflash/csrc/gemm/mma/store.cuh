// A warp's sums to out, 16 rows at a time through shared memory that only this warp uses: from the layout of mma to
// rows, so that every lane stores 16 bytes and a warp whole sectors.
#pragma once

#include "gemm/mma/fragments.cuh"

namespace qf {
namespace gemm {

// Rows are 8 words longer than they need be: the 8-byte stores of a half-warp, 4 rows x 4 lanes, then fill the 32
// banks.
constexpr int kSlabStride = kWarpN + 8;
constexpr int kSlabWords = 16 * kSlabStride;

// 16 rows of sums, in the words of shared memory.
template <class Sum>
struct Slab {
  struct alignas(8) Two {
    Sum x[2];
  };
  struct alignas(16) Four {
    Sum x[4];
  };
  Sum* s_words;

  __device__ __forceinline__ void write(const Sum (&c)[kWarpN / 8][4], int lane) const {
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<Two*>(s_words + (lane / 4 + 8 * half) * kSlabStride + 8 * j + lane % 4 * 2) =
            Two{{c[j][2 * half], c[j][2 * half + 1]}};
  }

  template <int kCount>
  __device__ __forceinline__ void read(Sum (&values)[kCount], int row, int column) const {
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
      const Four four = *reinterpret_cast<const Four*>(s_words + row * kSlabStride + column + e);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[e + i] = four.x[i];
    }
  }
};

// column0: of out, the warp's first. SwiGLU: the first 32 of the warp's 64 sums a row are gates, the others ups.
template <class Out, class Config, class Shape>
__device__ __forceinline__ void store_as(const QfLinearParams& p, bool vector, int row0, int column0,
                                         const Sums<Config, Shape>& sums, Slab<typename Config::Sum> slab, int lane) {
  constexpr bool kGated = Config::kGated;
  constexpr int kColumns = kGated ? kWarpN / 2 : kWarpN, kCount = 16 / sizeof(Out);
  constexpr int kAcross = kColumns / kCount, kDown = 32 / kAcross;
  constexpr int kUnroll = Config::kActivation == QF_IDENTITY ? 16 / kDown : 1;  // activations are long
  const int within = lane % kAcross * kCount, column = column0 + within;
  const Columns<kCount> columns(p, column), of_up(p, column, kGated);
#pragma unroll
  for (int i = 0; i < Shape::kWarpM / 16; ++i) {
    slab.write(sums.c[i], lane);
    __syncwarp();
#pragma unroll(kUnroll)
    for (int r = 0; r < 16; r += kDown) {
      const int row = r + lane / kAcross;
      typename Config::Sum values[kCount];
      slab.read(values, row, within);
      if constexpr (kGated) {
        typename Config::Sum ups[kCount];
        slab.read(ups, row, kColumns + within);
        store_gated<Out>(p, vector, row0 + 16 * i + row, column, values, ups, columns, of_up);
      } else {
        store_columns<Out, Config::kActivation>(p, vector, row0 + 16 * i + row, column, values, columns);
      }
    }
    __syncwarp();  // read before the next 16 rows overwrite it
  }
}

template <class Config, class Shape>
__device__ __forceinline__ void store_out(const QfLinearParams& p, bool vector, int row0, int column0,
                                          const Sums<Config, Shape>& sums, char* s_slab, int lane) {
  const Slab<typename Config::Sum> slab{reinterpret_cast<typename Config::Sum*>(s_slab)};
  if constexpr (!std::is_void_v<typename Config::Out>)
    store_as<typename Config::Out>(p, vector, row0, column0, sums, slab, lane);
  else if (p.out_dtype == QF_F32)
    store_as<float>(p, vector, row0, column0, sums, slab, lane);
  else
    store_as<typename Config::Element>(p, vector, row0, column0, sums, slab, lane);
}

}  // namespace gemm
}  // namespace qf
