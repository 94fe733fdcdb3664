// Rows from accumulators to global memory, 16 bytes at a time, without shared memory: the four lanes of a quad hold
// four words each of four neighbouring chunks, and swap them so that each has one chunk.
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "kernels/sm90_fwd/items.cuh"
#include "kernels/sm90_fwd/softmax.cuh"
#include "ptx/rcp.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace sm90_fwd {

// words[i]: this lane's word of chunk i, before; word i of this lane's chunk, after. lane % 4: which word, which chunk.
__device__ __forceinline__ uint4 swap_in_quad(const uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  const uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
  const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? words[2] : words[3], 1);
  // Chunks odd and odd + 2, words of this lane and its neighbour.
  const uint32_t a0 = odd ? x : words[0], a1 = odd ? words[1] : x, b0 = odd ? y : words[2], b1 = odd ? words[3] : y;
  const uint32_t z0 = __shfl_xor_sync(0xffffffffu, high ? a0 : b0, 2);
  const uint32_t z1 = __shfl_xor_sync(0xffffffffu, high ? a1 : b1, 2);
  return high ? make_uint4(z0, z1, b0, b1) : make_uint4(a0, a1, z0, z1);
}

// g_row[h]: the lane's h-th row, or nullptr where it does not exist. aligned: 16 bytes at a time.
__device__ __forceinline__ void store_rows(const float (&O)[1][kOTiles][4], Element* const (&g_row)[2], int head_dim,
                                           bool aligned, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < kOTiles; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = Tensor::pair(O[0][j + i][2 * h], O[0][j + i][2 * h + 1]);
      const uint4 chunk = swap_in_quad(words, lane);
      const int d = (j + lane % 4) * kPerChunk;
      if (!g_row[h] || d >= head_dim) continue;
      if (aligned) {
        *reinterpret_cast<uint4*>(g_row[h] + d) = chunk;
      } else {
        const uint32_t w[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int e = 0; e < kPerChunk; ++e) g_row[h][d + e].bits = uint16_t(w[e / 2] >> 16 * (e % 2));
      }
    }
}

// Divides a warp's rows by their sums of weights and stores them. warp_row: from the block's first.
__device__ __forceinline__ void finish(const QfAttnParams& p, const Record& record, float (&O)[1][kOTiles][4],
                                       const Rows& rows, int warp_row, int lane, bool aligned) {
  const int b = record.b, h = record.h, row0 = record.row0 + warp_row, len_q = record.seq.len_q;
  float* const g_lse = p.lse ? p.lse + b * p.lse_stride_b + h * p.lse_stride_h + record.seq.q0 : nullptr;
  Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + h * p.out.stride_h +
                         (record.seq.q0 + row0) * p.out.stride_t;  // the warp's first row
  Element* g_row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = lane / 4 + 8 * r;
    float sum = rows.l[r] + __shfl_xor_sync(0xffffffffu, rows.l[r], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool exists = row0 + i < len_q;
    float inverse = rcp(sum), lse = lse_of(rows.m[r], sum);
    if (!(sum > 0.0f)) {  // a row that sees no key has zeros; one whose scores were all -inf, or NaN, has NaN
      const KeyRange keys = record.mask.visible(row0 + i);
      if (keys.begin == keys.end) inverse = 0.0f, lse = -infinity();
    }
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) O[0][j][2 * r + e] *= inverse;
    if (g_lse && lane % 4 == 0 && exists) g_lse[row0 + i] = lse;
    g_row[r] = exists ? g_out + i * p.out.stride_t : nullptr;
  }
  store_rows(O, g_row, p.head_dim, aligned, lane);
  if (!record.spoiled) return;
  const HeadRows<Element> v(p.v, b, record.seq.k0, h / (p.q_heads / p.kv_heads), 0, 0, false);
  __syncwarp();  // other lanes change what this one stored
  for (int key0 = record.keys.begin; key0 < record.keys.end; key0 += kBlockN)
    if (!record.whole(key0))
      add_nonfinite_at([&](int i, int d) -> Element& { return g_out[i * p.out.stride_t + d]; }, row0,
                       min(16, len_q - row0), p.head_dim, key0, kBlockN, record.mask, lane,
                       [&](int j, int d) { return to_float(v.row(j)[d]); });
}

// All consumers, where they fill rows together.
struct Consumers {
  __device__ static __forceinline__ int thread() { return fresh_tid() - kGroupThreads; }
  __device__ static __forceinline__ int threads() { return kConsumers * kGroupThreads; }
};

// Rows of an item that sees no key at all: zeros, and lse of -inf.
__device__ inline void store_empty_rows(const QfAttnParams& p, const Record& record) {
  const int rows = min(kBlockM, record.seq.len_q - record.row0);
  for (int i = Consumers::thread(); i < rows; i += Consumers::threads()) {
    const int64_t row = record.seq.q0 + record.row0 + i;
    Element* const g_row = static_cast<Element*>(p.out.data) + record.b * p.out.stride_b + record.h * p.out.stride_h +
                           row * p.out.stride_t;
    for (int d = 0; d < p.head_dim; ++d) g_row[d].bits = 0;
    if (p.lse) p.lse[record.b * p.lse_stride_b + record.h * p.lse_stride_h + row] = -infinity();
  }
}

}  // namespace sm90_fwd
}  // namespace qf
