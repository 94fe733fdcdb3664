// Which block computes the gradients of which keys: one block per (key tile, batch, KV head), heads innermost; the
// first key tiles first, because under causal masks they are seen by the most queries. A launch may cover only a
// section of the columns, the pairs of a sequence and a KV head.
//
// Every row of dk and dv is written. Keys past kv_lens, and packed rows that belong to no sequence, get zeros, since no
// query sees them. Keys of a sequence whose description is out of range get NaN, as its rows of out do (sequence.cuh);
// where an array of offsets decreases, it is undefined which sequence a key belongs to, and all keys get NaN.
#pragma once

#include "attn/sequence.cuh"
#include "attn/tile_load.cuh"
#include "qflash.h"

namespace qf {

struct KeyGrid {
  int64_t first, work_tiles;      // first work tile of this launch, work tiles of all launches
  int64_t first_column, columns;  // of these work tiles
  int key_tiles;
  Vectorises vector;
};

// Host side, for all columns.
inline KeyGrid key_grid_of(const QfAttnParams& p, int tile_keys) {
  KeyGrid grid{};
  grid.key_tiles = int((int64_t(p.k_len) + tile_keys - 1) / tile_keys);
  int batch = p.batch;
  if (p.cu_seqlens_k && p.total_k > 0) {  // as in grid_of: rows that fit no sequence are written, too
    if (grid.key_tiles == 0) grid.key_tiles = 1;
    if (batch == 0) batch = 1;
  }
  grid.columns = int64_t(batch) * p.kv_heads;
  grid.work_tiles = grid.key_tiles * grid.columns;
  grid.vector = vectorises(p);
  return grid;
}
// For a section of the columns.
inline KeyGrid key_grid_of(const QfAttnParams& p, int tile_keys, int64_t first_column, int64_t columns) {
  KeyGrid grid = key_grid_of(p, tile_keys);
  grid.first_column = first_column;
  grid.columns = columns;
  grid.work_tiles = grid.key_tiles * columns;
  return grid;
}

struct KeyWork {
  int h, b, key_tile;  // h: KV head

  __device__ __forceinline__ KeyWork(const QfAttnParams& p, const KeyGrid& grid) {
    if (grid.work_tiles <= 0x7fffffff)
      split(uint32_t(blockIdx.x), p, grid);
    else
      split(uint64_t(grid.first + blockIdx.x), p, grid);
  }

 private:
  template <class Index>
  __device__ __forceinline__ void split(Index index, const QfAttnParams& p, const KeyGrid& grid) {
    const Index column = index % Index(grid.columns) + Index(grid.first_column);
    h = int(column % Index(p.kv_heads));
    b = int(column / Index(p.kv_heads));
    key_tile = int(index / Index(grid.columns));
  }
};

// Rows of k that belong to a sequence, and whether they are known.
struct KeyRows {
  int64_t first, owned;
  bool known;  // false: an array of offsets decreases, and all rows are treated as those of sequence 0
};

// Collective: every thread of the block calls it with the same b.
__device__ inline KeyRows read_key_rows(const QfAttnParams& p, int b) {
  if (!p.cu_seqlens_k) return {0, p.k_len, true};
  bool falls = p.batch == 0;
  for (int i = threadIdx.x; i < p.batch; i += blockDim.x)
    falls |= p.cu_seqlens_k[i + 1] < p.cu_seqlens_k[i] || p.cu_seqlens_q[i + 1] < p.cu_seqlens_q[i];
  if (threadIdx.x == 0) falls |= p.cu_seqlens_k[0] < 0 || p.cu_seqlens_q[0] < 0;
  if (__syncthreads_or(falls)) return {0, b == 0 ? p.total_k : 0, false};
  const int64_t end = p.cu_seqlens_k[b + 1] < p.total_k ? p.cu_seqlens_k[b + 1] : p.total_k;
  const int64_t first = p.cu_seqlens_k[b] < end ? p.cu_seqlens_k[b] : end;
  return {first, end - first, true};
}

// Writes `value` to rows begin .. end-1 of head h of x: this block's share of them (block `tile` of `tiles`).
template <class Element>
__device__ inline void fill_key_rows(const QfTensor& x, int b, int h, int64_t begin, int64_t end, int tile, int tiles,
                                     int head_dim, float value) {
  Element filling;
  from_float(value, filling);
  for (int64_t row = begin + int64_t(tile) * blockDim.x + threadIdx.x; row < end; row += int64_t(tiles) * blockDim.x) {
    Element* const g_row = static_cast<Element*>(x.data) + b * x.stride_b + row * x.stride_t + h * x.stride_h;
    for (int d = 0; d < head_dim; ++d) g_row[d] = filling;
  }
}

// Fills the rows of dk or dv (x) that no good sequence writes.
template <class Element>
__device__ inline void fill_unserved_keys(const QfAttnParams& p, const QfTensor& x, const KeyRows& rows, bool good,
                                          const KeyWork& work, int tiles) {
  const auto fill = [&](int64_t begin, int64_t end, float value) {
    fill_key_rows<Element>(x, work.b, work.h, begin, end, work.key_tile, tiles, p.head_dim, value);
  };
  if (!good || !rows.known) fill(rows.first, rows.first + rows.owned, nan());
  if (!p.cu_seqlens_k || !rows.known) return;
  if (work.b == 0) fill(0, p.cu_seqlens_k[0] < p.total_k ? p.cu_seqlens_k[0] : p.total_k, 0.0f);
  if (work.b == p.batch - 1) fill(p.cu_seqlens_k[p.batch], p.total_k, 0.0f);
}

}  // namespace qf
