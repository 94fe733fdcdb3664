// Which block computes which tile of out. Blocks that run at the same time should share what they read: a run of
// consecutive blocks covers a band of kBandRows row tiles, column by column, so that about a hundred of them touch
// about as many bytes of a as of b, and both stay in the L2 cache.
#pragma once

#include "gemm/bytes.cuh"
#include "qflash_ops.h"

namespace qf {
namespace gemm {

struct Grid {
  ByteMatrix a, b;  // a [m][k]; b as it lies in memory: [n][k] or [k][n]
  int row_tiles, column_tiles;
  bool vector_out;  // rows of out, and of pre, start on 16 bytes
};

// b's k runs along memory. Where both directions qualify (one of k and n is 1) it makes no difference.
inline bool k_contiguous(const QfLinearParams& p) { return p.w_stride_k == 1; }

// Host side.
inline Grid grid_of(const QfLinearParams& p, int tile_rows, int tile_columns) {
  const int out_bytes = p.out_dtype == QF_F16 || p.out_dtype == QF_BF16 ? 2 : 4;
  Grid grid;
  grid.a = byte_matrix(static_cast<const int8_t*>(p.x), p.x_stride_m, p.m, p.k);
  const int8_t* const w = static_cast<const int8_t*>(p.w);
  grid.b = k_contiguous(p) ? byte_matrix(w, p.w_stride_n, p.n, p.k) : byte_matrix(w, p.w_stride_k, p.k, p.n);
  grid.row_tiles = int((p.m + tile_rows - 1) / tile_rows);
  grid.column_tiles = int((p.n + tile_columns - 1) / tile_columns);
  grid.vector_out = reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_stride_m * out_bytes % 16 == 0 &&
                    (!p.pre || (reinterpret_cast<uintptr_t>(p.pre) % 16 == 0 && p.n * out_bytes % 16 == 0));
  return grid;
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
