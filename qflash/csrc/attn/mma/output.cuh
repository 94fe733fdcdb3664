// Epilogue: O from accumulators to global memory, rounded, laid out by rows in shared memory that only this warp uses,
// then stored 16 bytes at a time.
#pragma once

#include "attn/mma/softmax.cuh"
#include "attn/mma/tile.cuh"
#include "attn/sequence.cuh"
#include "attn/sinks.cuh"

namespace qf {

// Divides the lane's r-th row by its sum of weights; zeros for a row that sees no key. Writes lse if requested. row0:
// the lane's first row in its sequence; sink: of the head; lse_offset(row): is added to lse.
template <int kMTiles, int kOTiles, class Rows, class Offset>
__device__ __forceinline__ void finish_rows(float (&O)[kMTiles][kOTiles][4], const Rows (&rows)[kMTiles],
                                            const Mask& mask, int row0, float sink, float* g_lse, bool leads,
                                            Offset lse_offset) {
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r) {
    const int row = row0 + 8 * r;
    const float sum = rows[r / 2].sums.for_lse(r % 2);
    const KeyRange keys = mask.visible(row);
    const bool empty = keys.begin == keys.end;
    const WithSink with(rows[r / 2].m[r % 2], sink, lse_offset(row));
    const float factor = with.keys / with.total(rows[r / 2].sums.of_row(r % 2));
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& o = O[r / 2][j][r % 2 * 2 + e];
        o = empty ? 0.0f : o * factor;
      }
    if (g_lse && leads && row < mask.len_q) g_lse[row] = empty ? sink : with.lse(sum) + lse_offset(row);
  }
}

// Rounds the warp's rows into s_rows (kChunks chunks per row, swizzled), which only this warp uses.
template <class Tensor, int kChunks, int kMTiles>
__device__ __forceinline__ void round_rows(const float (&O)[kMTiles][kChunks][4], char* s_rows, int lane) {
  __syncwarp();  // the warp is done reading what s_rows held
#pragma unroll
  for (int r = 0; r < 2 * kMTiles; ++r)
#pragma unroll
    for (int j = 0; j < kChunks; ++j)
      *reinterpret_cast<uint32_t*>(s_rows + Swizzle<kChunks>::offset(8 * r + lane / 4, j) + lane % 4 * 4) =
          Tensor::pair(O[r / 2][j][r % 2 * 2], O[r / 2][j][r % 2 * 2 + 1]);
  __syncwarp();  // other lanes read what this one wrote
}

// Stores the first `rows` of them from there to g_out (row 0 of the warp).
template <int kChunks, class Element>
__device__ __forceinline__ void store_rows(const char* s_rows, Element* g_out, int64_t stride_t, int rows, int head_dim,
                                           bool aligned, int lane) {
#pragma unroll 4
  for (int i = lane; i < rows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * kPerChunk >= head_dim) continue;
    const uint4 x = *reinterpret_cast<const uint4*>(s_rows + Swizzle<kChunks>::offset(row, chunk));
    Element* const g_chunk = g_out + row * stride_t + chunk * kPerChunk;
    if (aligned) {
      *reinterpret_cast<uint4*>(g_chunk) = x;
    } else {
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e)
        if (chunk * kPerChunk + e < head_dim) g_chunk[e].bits = uint16_t(words[e / 2] >> 16 * (e % 2));
    }
  }
}

}  // namespace qf
