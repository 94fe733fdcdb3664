// Instructions that need no more than a warp or two, here and in emulator/hopper_small.cc: ptx/stmatrix.cuh,
// ptx/fma.cuh, ptx/add.cuh, mbarrier_test of ptx/mbarrier.cuh, and E4M3 in ptx/cvt.cuh.
#pragma once

#include "hopper/ring.cuh"
#include "ptx/add.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fma.cuh"
#include "ptx/stmatrix.cuh"
#include "qflash.h"

namespace small {

constexpr int kSharedBytes = 512;

// A warp stores four matrices. words: [4][32 lanes]; rows: [32], where row i % 8 of matrix i / 8 goes; out: [32][16
// bytes], row by row.
__device__ inline void store_matrices(char* s_rows, const uint32_t* g_words, const int32_t* g_rows, char* g_out) {
  const int lane = int(threadIdx.x);
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = g_words[32 * i + lane];
  qf::stmatrix_x4(s_rows + 16 * g_rows[lane], words);
  __syncwarp();
  for (int i = 0; i < 16; ++i) g_out[16 * lane + i] = s_rows[16 * lane + i];
}

// x, sums, out: [count] pairs of 16-bit floats.
__device__ inline void add_zeros(int dtype, int count, const uint32_t* g_x, const uint32_t* g_sums, uint32_t* g_out) {
  for (int i = int(threadIdx.x); i < count; i += 32)
    g_out[i] =
        dtype == QF_F16 ? qf::add_zero_times_f16x2(g_x[i], g_sums[i]) : qf::add_zero_times_bf16x2(g_x[i], g_sums[i]);
}

// Pairs of float16: out = x + y.
__device__ inline void add_pairs(int count, const uint32_t* g_x, const uint32_t* g_y, uint32_t* g_out) {
  for (int i = int(threadIdx.x); i < count; i += 32) g_out[i] = qf::add_f16x2(g_x[i], g_y[i]);
}

// x: [count][4]; codes: [count] words of four E4M3.
__device__ inline void encode(int count, const float* g_x, uint32_t* g_codes) {
  for (int i = int(threadIdx.x); i < count; i += 32)
    g_codes[i] = qf::cvt_rn_e4m3x4_f32(g_x[4 * i], g_x[4 * i + 1], g_x[4 * i + 2], g_x[4 * i + 3]);
}

// codes as above; out: [count][4] float16.
__device__ inline void decode(int count, const uint32_t* g_codes, uint32_t* g_out) {
  for (int i = int(threadIdx.x); i < count; i += 32) {
    uint32_t halves[2];
    qf::cvt_rn_f16x4_e4m3x4(halves, g_codes[i]);
    g_out[2 * i] = halves[0], g_out[2 * i + 1] = halves[1];
  }
}

// What a barrier for two says of either parity before each of `count` arrivals. answers: [count][2].
__device__ inline void ask(char* s_memory, int count, int32_t* g_answers) {
  auto* const s_barrier = reinterpret_cast<qf::Mbarrier*>(s_memory);
  if (threadIdx.x > 0) return;
  qf::mbarrier_init(s_barrier, 2);
  for (int i = 0; i < count; ++i) {
    for (int parity = 0; parity < 2; ++parity)
      g_answers[2 * i + parity] = qf::mbarrier_test(s_barrier, uint32_t(parity));
    qf::mbarrier_arrive(s_barrier);
  }
}

// A warp leaves numbers for another, which waits only if a test says that it must. found: [32], how often the number
// was that of the round.
__device__ inline void hand_over(char* s_memory, int rounds, int32_t* g_found) {
  auto& s_ring = *reinterpret_cast<qf::Ring<1>*>(s_memory);
  auto* const s_numbers = reinterpret_cast<int*>(s_memory + sizeof s_ring);
  const int lane = int(threadIdx.x) % 32, other = 31 - lane;
  if (threadIdx.x == 0) s_ring.init(1);
  __syncthreads();
  qf::Place<1> place;
  int found = 0;
  for (int round = 0; round < rounds; ++round, place.advance()) {
    if (threadIdx.x < 32) {
      place.wait_empty(s_ring);
      s_numbers[lane] = 32 * round + lane;
      __syncwarp();
      if (lane == 0) place.fill(s_ring);
    } else {
      if (!place.is_full(s_ring)) place.wait_full(s_ring);
      found += s_numbers[other] == 32 * round + other;
      __syncwarp();
      if (lane == 0) place.release(s_ring);
    }
  }
  if (threadIdx.x >= 32) g_found[lane] = found;
}

}  // namespace small
