// dS between the keys' kernel and the product that computes dQ from it (attn/backward/ds_tiles.h).
#pragma once

#include "attn/backward/ds_tiles.h"
#include "attn/mask.cuh"
#include "kernels/attention_backward/fa_mma_bwd/config.h"
#include "ptx/ldst.cuh"

namespace qf {
namespace fa_mma_bwd {

// The section of dS that is stored while a pair of launches runs.
struct StoredDs {
  char* g_tiles;  // null: dS is recomputed
  DsTiles tiles;
  int64_t first_column;  // pair of a sequence and a KV head that the first tiles belong to
  int64_t head_bytes;    // of a query head

  // Tiles of query head h of sequence b.
  __device__ __forceinline__ char* head(const QfAttnParams& p, int b, int h) const {
    return g_tiles + (int64_t(b) * p.q_heads + h - first_column * (p.q_heads / p.kv_heads)) * head_bytes;
  }
  // One of them. place: of its key tile, tiles.place().
  __device__ __forceinline__ char* tile(char* g_head, int query_tile, int place) const {
    return g_head + tiles.tile(0, query_tile, place) * kDsTileBytes;
  }
};

// Does the tile of 64 columns from `first` on overlap `seen`, columns that some of 64 rows see? Then all of it is
// stored.
__device__ __forceinline__ bool keeps_tile(const KeyRange& seen, int first) {
  return first < seen.end && first + kDsTile > seen.begin;
}

// dS of keys that do not exist is set to 0: otherwise whatever is in their place, possibly NaN, would be multiplied by
// zeros. row: the lane's first key; rows: of the sequence.
template <int kMTiles, int kSteps>
__device__ __forceinline__ void clear_missing_rows(uint32_t (&A)[kMTiles][kSteps][4], int row, int rows) {
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int word = 0; word < 4 * kSteps; ++word)
      if (row + 16 * i + word % 2 * 8 >= rows) A[i][word / 4][word % 4] = 0;
}

// A: dS of a warp's keys and 16 kSteps queries, as an A operand whose rows are keys. key: the warp's first in the tile;
// query: the first of the queries in the tile, a multiple of 16 kSteps.
template <int kMTiles, int kSteps>
__device__ __forceinline__ void store_ds(char* g_tile, const uint32_t (&A)[kMTiles][kSteps][4], uint32_t key,
                                         uint32_t query, uint32_t lane) {
  // chunk_of_ds() of the lane's first row and the first queries: rows are 8 apart, and halves of a row one bit.
  const uint32_t first = (key + lane / 4) * (2 * kDsTile) + ((lane % 4) ^ (lane / 4)) * 16, half = query / 32 * 64;
#pragma unroll
  for (int i = 0; i < kMTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      char* const g_row = g_tile + (16 * i + 8 * h) * (2 * kDsTile);
      if constexpr (kSteps == 1) {
        *reinterpret_cast<uint2*>(g_row + (first ^ half) + query % 32 / 2) = make_uint2(A[i][0][h], A[i][0][2 + h]);
      } else {
#pragma unroll
        for (int k = 0; k < kSteps; k += 2)
          st_global(g_row + (first ^ half ^ (k / 2 * 64)),
                    Word4{{A[i][k][h], A[i][k][2 + h], A[i][k + 1][h], A[i][k + 1][2 + h]}});
      }
    }
}

}  // namespace fa_mma_bwd
}  // namespace qf
