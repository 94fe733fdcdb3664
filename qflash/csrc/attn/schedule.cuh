// Which block computes what: one block per (row tile, batch, head, part), parts innermost, then heads, so that heads
// that share K run concurrently; the last row tiles first, because causal masks make them the longest.
#pragma once

#include "attn/tile_load.cuh"
#include "qflash.h"

namespace qf {

struct Grid {
  int64_t first, work_tiles;  // first work tile of this launch, work tiles of all launches
  int row_tiles, parts, batch;
  Vectorises vector;
};

// Host side. `parts`: the number of parts that every row tile is cut into.
inline Grid grid_of(const QfAttnParams& p, int tile_rows, int parts) {
  Grid grid{};
  grid.row_tiles = (int64_t(p.q_len) + tile_rows - 1) / tile_rows;
  grid.batch = p.batch;
  // Packed rows that fit no sequence still get NaN, so there is a block even where lengths are 0.
  if (p.cu_seqlens_q && p.total_q > 0) {
    if (grid.row_tiles == 0) grid.row_tiles = 1;
    if (grid.batch == 0) grid.batch = 1;
  }
  grid.parts = parts;
  grid.work_tiles = int64_t(grid.row_tiles) * grid.batch * p.q_heads * parts;
  grid.vector = vectorises(p);
  return grid;
}

struct Work {
  int part, h, b, row_tile;

  __device__ __forceinline__ Work(const QfAttnParams& p, const Grid& grid) {
    if (grid.work_tiles <= 0x7fffffff)  // nearly always; divisions of 64 bits take a hundred instructions each
      split(uint32_t(blockIdx.x), p, grid);
    else
      split(uint64_t(grid.first + blockIdx.x), p, grid);
  }

 private:
  template <class Index>
  __device__ __forceinline__ void split(Index index, const QfAttnParams& p, const Grid& grid) {
    part = int(index % Index(grid.parts)), index /= Index(grid.parts);
    h = int(index % Index(p.q_heads)), index /= Index(p.q_heads);
    b = int(index % Index(grid.batch)), index /= Index(grid.batch);
    row_tile = grid.row_tiles - 1 - int(index);
  }
};

}  // namespace qf
