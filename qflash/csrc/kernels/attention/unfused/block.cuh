// What a block of `unfused` computes, and transfers of tiles of S, P and O to and from global memory.
#pragma once

#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "attn/tile_load.cuh"
#include "kernels/attention/unfused/config.h"

namespace qf {
namespace unfused {

// Rows row0 .. of one head.
struct Block {
  const QfAttnParams& p;
  const Work work;
  const Sequence seq = read_padded_sequence(p, work.b);
  const Mask mask = {p.window_left, p.window_right, p.q_len, seq.good ? seq.len_k : 0};  // no keys in a bad sequence
  const int row0, last_row = min(row0 + kBlockM, p.q_len) - 1;
  // This lane's position in a tile of either product: its column, its first row (the others are kLanesY apart).
  const int x = Lanes<kLanesX>::x(threadIdx.x % 32);
  const int y = threadIdx.x / 32 * kWarpRows + Lanes<kLanesX>::y(threadIdx.x % 32);

  __device__ __forceinline__ Block(const QfAttnParams& params, const Grid& grid, int rows)
      : p(params), work(params, grid), row0(work.row_tile * rows) {}

  __device__ __forceinline__ HeadRows<Element> q_rows(bool vector) const {
    return HeadRows<Element>(p.q, work.b, 0, work.h, p.q_len, p.head_dim, vector);
  }
  __device__ __forceinline__ HeadRows<Element> kv_rows(const QfTensor& x, bool vector) const {
    return HeadRows<Element>(x, work.b, 0, work.h / (p.q_heads / p.kv_heads), mask.len_k, p.head_dim, vector);
  }
  // Row i of S, or of P.
  __device__ __forceinline__ float* g_scores(int i) const {
    return static_cast<float*>(p.workspace) + ((int64_t(work.b) * p.q_heads + work.h) * p.q_len + i) * p.k_len;
  }

  // The lane's scores of keys key0 + x, key0 + x + kLanesX, ..
  __device__ __forceinline__ void store_scores(const float (&S)[kRows][kScoreCols], int key0) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < kScoreCols; ++j) {
        const int row = row0 + y + r * kLanesY, key = key0 + x + j * kLanesX;
        if (row < p.q_len && key < mask.len_k) g_scores(row)[key] = S[r][j];
      }
  }
  // s_p <- the block's rows of P from key0 on, 0 where a row does not see the key.
  __device__ __forceinline__ void load_weights(float* s_p, int key0) const {
    const TileMask<1> sees(mask, row0, key0);
    for (int i = threadIdx.x; i < kBlockM * kBlockN; i += kThreads) {
      const int r = i / kBlockN, j = i % kBlockN;
      const bool counts = row0 + r < p.q_len && sees(r, j);
      s_p[r * kPStride + j] = counts ? g_scores(row0 + r)[key0 + j] : 0.0f;
    }
  }
  // The lane's channels d0 + 4 x .. of out.
  __device__ __forceinline__ void store_o(const float (&O)[kRows][4 * kOutVecs], int d0, bool vector) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = row0 + y + r * kLanesY;
      Element* const g_row =
          static_cast<Element*>(p.out.data) + work.b * p.out.stride_b + row * p.out.stride_t + work.h * p.out.stride_h;
      if (row < p.q_len) store4(g_row, d0 + 4 * x, p.head_dim, vector, O[r]);
    }
  }
};

}  // namespace unfused
}  // namespace qf
