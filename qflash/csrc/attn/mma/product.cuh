// The two matrix products on tensor cores, from swizzled shared memory and registers. A warp owns kMTiles x 16 rows;
// with g = lane / 4 and t = lane % 4 a lane holds, of each 16 x 8 block of S or O, rows g and g + 8, columns 2t and
// 2t + 1 (ptx/mma.cuh). The accumulators of S have exactly the layout of the A operand of PV, so P never leaves the
// registers.
#pragma once

#include "common/elements.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "smem/swizzle.cuh"

namespace qf {

// c += a b for 16 x 16 times 16 x 8; two weights rounded to the type of the MMA, and back.
template <class Element, int kArch>
struct Tensor16;
template <int kArch>
struct Tensor16<F16, kArch> {
  static constexpr uint32_t kOnes = 0x3c003c00u;
  __device__ static __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kArch >= 80) {
      mma_m16n8k16_f16(c, a, b0, b1);
    } else {
      mma_m16n8k8_f16(c, a[0], a[1], b0);
      mma_m16n8k8_f16(c, a[2], a[3], b1);
    }
  }
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return cvt_rn_f16x2_f32(low, high); }
  __device__ static __forceinline__ float low(uint32_t pair) { return cvt_f32_f16(uint16_t(pair)); }
  __device__ static __forceinline__ float high(uint32_t pair) { return cvt_f32_f16(uint16_t(pair >> 16)); }
};
template <int kArch>
struct Tensor16<BF16, kArch> {
  static_assert(kArch >= 80, "bfloat16 needs the tensor cores of sm_80");
  static constexpr uint32_t kOnes = 0x3f803f80u;
  __device__ static __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_bf16(c, a, b0, b1);
  }
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return cvt_rn_bf16x2_f32(low, high); }
  __device__ static __forceinline__ float low(uint32_t pair) { return bits_to_float(pair << 16); }
  __device__ static __forceinline__ float high(uint32_t pair) { return bits_to_float(pair & 0xffff0000u); }
};

// c += a b for 16 x 32 times 32 x 8, int8 with exact sums. Fragments are 16 bytes of a row wide, like the 16-bit ones,
// so ldmatrix loads them into the same lanes.
template <int kArch>
struct Tensor8 {
  __device__ static __forceinline__ void multiply(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kArch >= 80) {
      mma_m16n8k32_s8(c, a, b0, b1);
    } else {
      mma_m8n8k16_s8(c[0], c[1], a[0], b0);
      mma_m8n8k16_s8(c[0], c[1], a[2], b1);
      mma_m8n8k16_s8(c[2], c[3], a[1], b0);
      mma_m8n8k16_s8(c[2], c[3], a[3], b1);
    }
  }
};

// A lane's ldmatrix addresses in a tile whose rows have kChunks chunks: the row it points at, the column it starts at,
// and the swizzle of that row, which is the same for every block of 8 rows.
template <int kChunks>
struct LaneRows {
  int row_bytes;  // offset of the lane's row in the first block
  int chunk;      // 0 or 1: which of a pair of chunks, already permuted

  // Offset of chunk pair `pair` (2 pair, 2 pair + 1) in the block of rows that starts at `first`, a multiple of 8.
  __device__ __forceinline__ int at(int first, int pair) const {
    return row_bytes + first * (16 * kChunks) + (chunk ^ (pair << 5));
  }
};

// Lanes of matrices 0..3 point at (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1): A fragments of Q; transposed,
// B fragments of V.
template <int kChunks>
__device__ __forceinline__ LaneRows<kChunks> rows_then_chunks(int lane) {
  const int row = lane % 16;
  return {row * (16 * kChunks), (lane / 16 ^ Swizzle<kChunks>::phase(row)) << 4};
}
// (rows 0-7, chunk 0), (0-7, 1), (8-15, 0), (8-15, 1): B fragments of K for two blocks of 8 keys.
template <int kChunks>
__device__ __forceinline__ LaneRows<kChunks> chunks_then_rows(int lane) {
  const int row = lane % 8 + lane / 16 * 8;
  return {row * (16 * kChunks), (lane / 8 % 2 ^ Swizzle<kChunks>::phase(row)) << 4};
}

// S += Q Kt. s_q: the warp's rows, s_k: kNTiles * 8 keys; both with kChunks chunks of channels a row.
// Per pair of chunks: kMTiles + kNTiles / 2 ldmatrix for kMTiles * kNTiles mma.
template <class Tensor, int kChunks, class Sum, int kMTiles, int kNTiles>
__device__ __forceinline__ void qk_mma(Sum (&S)[kMTiles][kNTiles][4], const char* s_q, const char* s_k, int lane) {
  const auto q_lane = rows_then_chunks<kChunks>(lane);
  const auto k_lane = chunks_then_rows<kChunks>(lane);
#pragma unroll
  for (int pair = 0; pair < kChunks / 2; ++pair) {
    uint32_t q[kMTiles][4];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) ldmatrix_x4(q[i], s_q + q_lane.at(16 * i, pair));
#pragma unroll
    for (int j = 0; j < kNTiles; j += 2) {
      uint32_t k[4];
      ldmatrix_x4(k, s_k + k_lane.at(8 * j, pair));
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        Tensor::multiply(S[i][j], q[i], k[0], k[1]);
        Tensor::multiply(S[i][j + 1], q[i], k[2], k[3]);
      }
    }
  }
}

// Two weights as operands of the MMA: rounded, or their remainders.
template <class Tensor>
struct Rounded {
  __device__ static __forceinline__ uint32_t pair(float low, float high) { return Tensor::pair(low, high); }
};
template <class Tensor>
struct Remainder {
  __device__ static __forceinline__ uint32_t pair(float low, float high) {
    const uint32_t rounded = Tensor::pair(low, high);
    return Tensor::pair(low - Tensor::low(rounded), high - Tensor::high(rounded));
  }
};

// O += P V; the row statistics accumulate the weights as they are multiplied. P: weights in the layout of S; s_v:
// kNTiles * 8 keys of kChunks chunks of channels. Per 16 keys: kChunks / 2 ldmatrix for kMTiles * kChunks mma.
template <class Tensor, int kChunks, template <class> class Part = Rounded, int kMTiles, int kNTiles, class Rows>
__device__ __forceinline__ void pv_mma(float (&O)[kMTiles][kChunks][4], Rows (&rows)[kMTiles],
                                       const float (&P)[kMTiles][kNTiles][4], const char* s_v, int lane) {
  const auto v_lane = rows_then_chunks<kChunks>(lane);
#pragma unroll
  for (int j = 0; j < kNTiles; j += 2) {
    uint32_t p[kMTiles][4];
#pragma unroll
    for (int i = 0; i < kMTiles; ++i) {
      p[i][0] = Part<Tensor>::pair(P[i][j][0], P[i][j][1]);
      p[i][1] = Part<Tensor>::pair(P[i][j][2], P[i][j][3]);
      p[i][2] = Part<Tensor>::pair(P[i][j + 1][0], P[i][j + 1][1]);
      p[i][3] = Part<Tensor>::pair(P[i][j + 1][2], P[i][j + 1][3]);
      rows[i].sums.template add_rounded<Tensor>(p[i]);
    }
#pragma unroll
    for (int pair = 0; pair < kChunks / 2; ++pair) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, s_v + v_lane.at(8 * j, pair));
#pragma unroll
      for (int i = 0; i < kMTiles; ++i) {
        Tensor::multiply(O[i][2 * pair], p[i], v[0], v[1]);
        Tensor::multiply(O[i][2 * pair + 1], p[i], v[2], v[3]);
      }
    }
  }
}

}  // namespace qf
