// How a tile of a or b gets into shared memory, rows of 128 bytes along k (gemm/swizzle.cuh). Three ways, one
// interface: fetch(k0, s_tile) starts it, stash(s_tile) ends it; copies of AsyncRows are complete once their group is.
#pragma once

#include "gemm/bytes.cuh"
#include "kernels/linear/int8_gemm_tc/config.h"
#include "ptx/cp_async.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace int8_gemm_tc {

using namespace qf::gemm;

// Threads walk rows of eight 16-byte chunks: eight lanes read 128 neighbouring bytes.
constexpr int kChunks = kBlockK / 16;

// Memory runs along k and is aligned: cp.async, past the registers.
template <int kRows, int kThreads>
struct AsyncRows {
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kHeldWords = 0;  // registers it keeps during a step
  const ByteMatrix& x;
  const int row0;
  __device__ __forceinline__ AsyncRows(const ByteMatrix& matrix, int first) : x(matrix), row0(first) {}

  __device__ __forceinline__ void fetch(int k0, char* s_tile) {
    const unsigned thread = fresh_tid(), chunk = thread % kChunks, row = thread / kChunks;
    const unsigned s_first = swizzled(row, chunk);
    const int column = k0 + int(chunk * 16), rows_left = x.rows - row0 - int(row);
    const int8_t* g_from = x.g_data + (row0 + int(row)) * x.stride + column;
    const bool inside = column < x.columns;
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i) {
      cp_async_16(s_tile + swizzled_further(s_first, i * (kRowsPerPass / 16), 0), g_from,
                  inside && i * kRowsPerPass < rows_left);
      g_from += kRowsPerPass * x.stride;
    }
  }
  __device__ __forceinline__ void stash(char*) const {}
};

// Memory runs along k: through registers, at any alignment and on any architecture.
template <int kRows, int kThreads>
struct HeldRows {
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kHeldWords = kRows / kRowsPerPass * 4;
  const ByteMatrix& x;
  const int row0;
  Bytes16 held[kRows / kRowsPerPass];
  __device__ __forceinline__ HeldRows(const ByteMatrix& matrix, int first) : x(matrix), row0(first) {}

  __device__ __forceinline__ void fetch(int k0, char*) {
    const unsigned thread = fresh_tid();
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i)
      held[i] = load16(x, row0 + thread / kChunks + i * kRowsPerPass, k0 + thread % kChunks * 16);
  }
  __device__ __forceinline__ void stash(char* s_tile) const {
    const unsigned thread = fresh_tid(), s_first = swizzled(thread / kChunks, thread % kChunks);
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i) {
      const auto& word = held[i].word;
      *reinterpret_cast<uint4*>(s_tile + swizzled_further(s_first, i * (kRowsPerPass / 16), 0)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// Memory runs along n: a thread fetches patches of 4 k x 16 n and transposes them on the way. A warp's lanes are 8
// words of k x 4 patches along n: 64 neighbouring bytes of 8 rows in global memory, all 32 banks in shared memory.
template <int kColumns, int kThreads>
struct HeldColumns {
  static constexpr int kWarpsK = kBlockK / 32, kWarpsAcross = kThreads / 32 / kWarpsK;
  static constexpr int kPatches = kColumns / 64 / kWarpsAcross;
  static constexpr int kHeldWords = kPatches * 16;
  const ByteMatrix& x;
  const int column0;
  Bytes16 held[kPatches][4];
  __device__ __forceinline__ HeldColumns(const ByteMatrix& matrix, int first) : x(matrix), column0(first) {}

  __device__ static __forceinline__ unsigned group(unsigned thread) {
    return thread / 32 % kWarpsK * 8 + thread % 32 / 4;
  }
  __device__ static __forceinline__ unsigned column(unsigned thread, unsigned patch) {
    return (thread / 32 / kWarpsK + patch * kWarpsAcross) * 64 + thread % 4 * 16;
  }

  __device__ __forceinline__ void fetch(int k0, char*) {
    const unsigned thread = fresh_tid();
#pragma unroll
    for (int i = 0; i < kPatches; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) held[i][r] = load16(x, k0 + 4 * group(thread) + r, column0 + column(thread, i));
  }
  __device__ __forceinline__ void stash(char* s_tile) const {
    const unsigned thread = fresh_tid(), g = group(thread);
#pragma unroll
    for (int i = 0; i < kPatches; ++i)
#pragma unroll
      for (int four = 0; four < 4; ++four) {
        uint32_t word[4];
        transpose4x4(word, held[i][0].word[four], held[i][1].word[four], held[i][2].word[four], held[i][3].word[four]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *reinterpret_cast<uint32_t*>(s_tile + swizzled(column(thread, i) + 4 * four + j, g / 4) + g % 4 * 4) =
              word[j];
      }
  }
};

}  // namespace int8_gemm_tc
}  // namespace qf
