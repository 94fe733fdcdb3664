// Instructions that need no more than a warp or two: ptx/stmatrix.cuh, ptx/fma.cuh, ptx/add.cuh, mbarrier_test of
// ptx/mbarrier.cuh, and E4M3 in ptx/cvt.cuh.
#include "hopper/ring.cuh"
#include "launch_one.cuh"
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
  qf::RingPosition<1> place;
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

__global__ void small_matrices(const uint32_t* g_words, const int32_t* g_rows, char* g_out) {
  extern __shared__ float4 s_memory[];
  small::store_matrices(reinterpret_cast<char*>(s_memory), g_words, g_rows, g_out);
}
__global__ void small_zeros(int dtype, int count, const uint32_t* g_x, const uint32_t* g_sums, uint32_t* g_out) {
  small::add_zeros(dtype, count, g_x, g_sums, g_out);
}
__global__ void small_pairs(int count, const uint32_t* g_x, const uint32_t* g_y, uint32_t* g_out) {
  small::add_pairs(count, g_x, g_y, g_out);
}
__global__ void small_codes(int count, const float* g_x, uint32_t* g_codes) { small::encode(count, g_x, g_codes); }
__global__ void small_decoded(int count, const uint32_t* g_codes, uint32_t* g_out) {
  small::decode(count, g_codes, g_out);
}
__global__ void small_answers(int count, int32_t* g_answers) {
  extern __shared__ float4 s_memory[];
  small::ask(reinterpret_cast<char*>(s_memory), count, g_answers);
}
__global__ void small_numbers(int rounds, int32_t* g_found) {
  extern __shared__ float4 s_memory[];
  small::hand_over(reinterpret_cast<char*>(s_memory), rounds, g_found);
}

QF_EXPORT int try_matrices(const uint32_t* words, const int32_t* rows, char* out) {
  return launch_one(32, small::kSharedBytes, small_matrices, words, rows, out);
}
QF_EXPORT int try_zeros(int dtype, int count, const uint32_t* x, const uint32_t* sums, uint32_t* out) {
  return launch_one(32, 0, small_zeros, dtype, count, x, sums, out);
}
QF_EXPORT int try_pairs(int count, const uint32_t* x, const uint32_t* y, uint32_t* out) {
  return launch_one(32, 0, small_pairs, count, x, y, out);
}
QF_EXPORT int try_codes(int count, const float* x, uint32_t* codes) {
  return launch_one(32, 0, small_codes, count, x, codes);
}
QF_EXPORT int try_decoded(int count, const uint32_t* codes, uint32_t* out) {
  return launch_one(32, 0, small_decoded, count, codes, out);
}
QF_EXPORT int try_answers(int count, int32_t* answers) {
  return launch_one(32, small::kSharedBytes, small_answers, count, answers);
}
QF_EXPORT int try_numbers(int rounds, int32_t* found) {
  return launch_one(64, small::kSharedBytes, small_numbers, rounds, found);
}
