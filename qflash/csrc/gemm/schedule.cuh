// The tile scheduler: which block computes which tile of out. Concurrent blocks should share what they read:
// consecutive blocks cover a band of kBandRows row tiles, column by column, so that about a hundred of them read about
// as many bytes of x as of w, and both stay in the L2 cache.
#pragma once

#include "gemm/bytes.cuh"
#include "qflash_ops.h"

namespace qf {
namespace gemm {

// Both operands of a product, in their memory layouts.
struct Operands {
  ByteMatrix x;     // [m][k], or [k][m] where m is contiguous
  ByteMatrix w[2];  // likewise: [n][k] or [k][n]; the second is up
};

struct Grid : Operands {
  int row_tiles, column_tiles;
  bool vector_out;  // rows of out, residual and pre are aligned to 16 bytes
};

// Is k contiguous? Where both dimensions are (one of the extents is 1), the answer makes no difference.
inline bool x_along_k(const QfLinearParams& p) { return p.x_stride_k == 1; }
inline bool w_along_k(const QfLinearParams& p) { return p.w_stride_k == 1; }

// Bytes of an element of a QfDtype or QfOpDtype.
constexpr int bytes_of(int dtype) { return dtype == QF_I8 ? 1 : dtype == QF_F16 || dtype == QF_BF16 ? 2 : 4; }

// Host side, as is grid_of.
inline Operands operands_of(const QfLinearParams& p) {
  const int size = bytes_of(p.dtype);
  const auto weight = [&](const void* data, int64_t stride_k, int64_t stride_n) {
    return w_along_k(p) ? byte_matrix(data, size, stride_n, p.n, p.k) : byte_matrix(data, size, stride_k, p.k, p.n);
  };
  return {
      x_along_k(p) ? byte_matrix(p.x, size, p.x_stride_m, p.m, p.k) : byte_matrix(p.x, size, p.x_stride_k, p.k, p.m),
      {weight(p.w, p.w_stride_k, p.w_stride_n), weight(p.up, p.up_stride_k, p.up_stride_n)}};
}

inline Grid grid_of(const QfLinearParams& p, const Operands& operands, int tile_rows, int tile_columns) {
  const auto aligned = [&](const void* data, int64_t stride) {
    return !data || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * bytes_of(p.out_dtype) % 16 == 0);
  };
  const bool vector_out = aligned(p.out, p.out_stride_m) && aligned(p.residual, p.residual_stride_m) &&
                          aligned(p.pre, p.n) && aligned(p.pre_up, p.n);
  return {operands, int((p.m + tile_rows - 1) / tile_rows), int((p.n + tile_columns - 1) / tile_columns), vector_out};
}

struct Tile {
  int row, column;  // counted in tiles

  __device__ __forceinline__ Tile(const Grid& grid, int block, int band_rows) {
    const int band = block / (band_rows * grid.column_tiles);
    const int first = band * band_rows;
    const int rows = min(band_rows, grid.row_tiles - first);
    const int within = block - first * grid.column_tiles;
    row = first + within % rows;
    column = within / rows;
  }
};

}  // namespace gemm
}  // namespace qf
