// Rows from accumulators to global memory, 16 bytes at a time, without shared memory: the four lanes of a quad hold
// four words each of four neighbouring chunks, and swap them so that each has one chunk.
#pragma once

#include "attn/mma/nonfinite.cuh"
#include "attn/mma/softmax.cuh"
#include "kernels/sm90_fwd/config.h"

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

}  // namespace sm90_fwd
}  // namespace qf
