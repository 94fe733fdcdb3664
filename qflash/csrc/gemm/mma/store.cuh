// The epilogue of a warp: from accumulators of mma.sync to out.
#pragma once

#include "gemm/mma/fragments.cuh"
#include "gemm/slab.cuh"

namespace qf {
namespace gemm {

// Writes sixteen rows of accumulators to a slab.
template <class Sum>
__device__ __forceinline__ void write_slab(Sum* s_slab, const Sum (&c)[kWarpN / 8][4], int lane) {
  struct alignas(8) Two {
    Sum x[2];
  };
#pragma unroll
  for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<Two*>(s_slab + (lane / 4 + 8 * half) * kSlabStride + 8 * j + lane % 4 * 2) =
          Two{{c[j][2 * half], c[j][2 * half + 1]}};
}

// row0, column0: the warp's first row and column of out.
template <class Out, class Config, class Shape>
__device__ __forceinline__ void store_as(const QfLinearParams& p, bool vector, int row0, int column0,
                                         const Sums<Config, Shape>& sums, typename Config::Sum* s_slab, int lane) {
  const SlabColumns<Out, Config::kActivation, typename Config::Sum> columns(p, column0, lane);
#pragma unroll
  for (int i = 0; i < Shape::kWarpM / 16; ++i) {
    write_slab(s_slab, sums.c[i], lane);
    __syncwarp();
    columns.store(p, vector, row0 + 16 * i, s_slab);
    __syncwarp();  // read before the next 16 rows overwrite it
  }
}

template <class Config, class Shape>
__device__ __forceinline__ void store_out(const QfLinearParams& p, bool vector, int row0, int column0,
                                          const Sums<Config, Shape>& sums, typename Config::Sum* s_slab, int lane) {
  if constexpr (!std::is_void_v<typename Config::Out>)
    store_as<typename Config::Out>(p, vector, row0, column0, sums, s_slab, lane);
  else if (p.out_dtype == QF_F32)
    store_as<float>(p, vector, row0, column0, sums, s_slab, lane);
  else
    store_as<typename Config::Element>(p, vector, row0, column0, sums, s_slab, lane);
}

}  // namespace gemm
}  // namespace qf
