// The epilogue of a warp, 16 rows at a time through shared memory that only this warp uses: from the tensor cores'
// accumulator layout to rows, so that every lane stores 16 bytes and a warp stores full sectors.
#pragma once

#include "gemm/epilogue.cuh"

namespace qf {
namespace gemm {

constexpr int kWarpN = 64;  // columns of a warp's accumulators

// Rows are padded by 8 words: the 8-byte stores of a half-warp in the layout of mma, 4 rows x 4 lanes, then cover the
// 32 banks.
constexpr int kSlabStride = kWarpN + 8;
constexpr int kSlabWords = 16 * kSlabStride;

// The kCount columns of every slab that a lane finishes. SwiGLU: the first 32 of a row's 64 accumulators are gates, the
// others ups.
template <class Out, int kActivation, class Sum>
struct SlabColumns {
  static constexpr bool kGated = kActivation == QF_SWIGLU;
  static constexpr int kColumns = kGated ? kWarpN / 2 : kWarpN, kCount = 16 / sizeof(Out);
  static constexpr int kAcross = kColumns / kCount, kDown = 32 / kAcross;
  static constexpr int kUnroll = kActivation == QF_IDENTITY ? 16 / kDown : 1;  // activations take many instructions
  const int lane, within, column;
  const Columns<kCount> columns, of_up;

  // column0: the warp's first column of out.
  __device__ __forceinline__ SlabColumns(const QfLinearParams& p, int column0, int lane_)
      : lane(lane_),
        within(lane % kAcross * kCount),
        column(column0 + within),
        columns(p, column),
        of_up(p, column, kGated) {}

  // Stores sixteen rows of out from row0 on.
  __device__ __forceinline__ void store(const QfLinearParams& p, bool vector, int row0, const Sum* s_slab) const {
#pragma unroll(kUnroll)
    for (int r = 0; r < 16; r += kDown) {
      const int row = r + lane / kAcross;
      const Sum* const s_row = s_slab + row * kSlabStride + within;
      Sum values[kCount];
      read(values, s_row);
      if constexpr (kGated) {
        Sum ups[kCount];
        read(ups, s_row + kColumns);
        store_gated<Out>(p, vector, row0 + row, column, values, ups, columns, of_up);
      } else {
        store_columns<Out, kActivation>(p, vector, row0 + row, column, values, columns);
      }
    }
  }

 private:
  __device__ static __forceinline__ void read(Sum (&values)[kCount], const Sum* s_values) {
    struct alignas(16) Four {
      Sum x[4];
    };
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
      const Four four = *reinterpret_cast<const Four*>(s_values + e);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[e + i] = four.x[i];
    }
  }
};

}  // namespace gemm
}  // namespace qf
