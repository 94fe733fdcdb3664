// Loads of a tile of x or w into shared memory, as rows of 128 bytes (gemm/swizzle.cuh). A tile of kRows rows of x, or
// columns of w, has one of two layouts:
//   rows     [kRows][128 bytes of k]: operands contiguous along k, and int8 that is transposed by the loader
//   panels   [kRows / 64][64 k][64 elements of 16 bits]: contiguous along m or n, as in memory; for ldmatrix.trans
// Loaders have one interface: fetch(step, s_tile) starts a step's copies, stash(s_tile) finishes them; asynchronous
// ones are complete once their group is. kDown: k runs down the rows of the tile (panels). Of two matrices side by
// side, 32 of every 64 rows of the tile belong to the first and 32 to the second, so that a warp's 64 columns are 32 of
// w and the same 32 of up.
#pragma once

#include "gemm/bytes.cuh"
#include "gemm/mma/config.cuh"
#include "gemm/source.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace gemm {

// A row is eight 16-byte chunks: eight lanes read 128 neighbouring bytes, a pass of 256 threads 32 rows.
constexpr int kChunks = kStepBytes / 16;
constexpr int kPassRows = 32;
constexpr int kPanel = 64;  // rows of k, and columns, of a panel

// Contiguous along k and aligned: cp.async, which bypasses registers.
template <int kRows, int kThreads, Source kSource>
struct AsyncRows {
  static_assert(kThreads / kChunks == kPassRows, "a pass is 32 rows");
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  static constexpr int kHeldWords = 0;  // registers held during a step
  static constexpr bool kDown = false;
  const StepsOf<kSource> of;
  const int row0;
  __device__ __forceinline__ AsyncRows(const ByteMatrix* x, int first, int begin)
      : of{x, first}, row0(begin / kSources) {}

  __device__ __forceinline__ void fetch(int step, char* s_tile) {
    const unsigned thread = fresh_tid(), chunk = thread % kChunks, row = thread / kChunks;
    const unsigned s_first = swizzled(row, chunk);
    const ByteMatrix& x = of.matrix(step);
    const int column = of.within(step) * kStepBytes + int(chunk * 16), rows_left = x.rows - row0 - int(row);
    const bool inside = column < x.columns;
    const int8_t* g_from[kSources];
#pragma unroll
    for (int s = 0; s < kSources; ++s) g_from[s] = (&x)[s].g_data + (row0 + int(row)) * (&x)[s].stride + column;
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) {
      const int s = i % kSources;
      cp_async_16(s_tile + swizzled_further(s_first, i * (kPassRows / 16), 0), g_from[s],
                  inside && i / kSources * kPassRows < rows_left);
      g_from[s] += kPassRows * (&x)[s].stride;
    }
  }
  __device__ __forceinline__ void stash(char*) const {}
};

// Contiguous along k: through registers, at any alignment and on any architecture.
template <int kRows, int kThreads, Source kSource>
struct HeldRows {
  static_assert(kThreads / kChunks == kPassRows, "a pass is 32 rows");
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  static constexpr int kHeldWords = kRows / kPassRows * 4;
  static constexpr bool kDown = false;
  const StepsOf<kSource> of;
  const int row0;
  Bytes16 held[kRows / kPassRows];
  __device__ __forceinline__ HeldRows(const ByteMatrix* x, int first, int begin)
      : of{x, first}, row0(begin / kSources) {}

  __device__ __forceinline__ void fetch(int step, char*) {
    const unsigned thread = fresh_tid();
    const ByteMatrix& x = of.matrix(step);
    const int k0 = of.within(step) * kStepBytes;
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i)
      held[i] =
          load16((&x)[i % kSources], row0 + thread / kChunks + i / kSources * kPassRows, k0 + thread % kChunks * 16);
  }
  __device__ __forceinline__ void stash(char* s_tile) const {
    const unsigned thread = fresh_tid(), s_first = swizzled(thread / kChunks, thread % kChunks);
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) {
      const auto& word = held[i].word;
      *reinterpret_cast<uint4*>(s_tile + swizzled_further(s_first, i * (kPassRows / 16), 0)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// int8, contiguous along n: a thread fetches patches of 4 k x 16 n and transposes them in registers. A warp's lanes
// cover 8 words of k x 4 patches along n: 64 neighbouring bytes of 8 rows in global memory, all 32 banks in shared
// memory.
template <int kColumns, int kThreads, Source kSource>
struct HeldColumns {
  static_assert(kSource != Source::kChained, "integers have no backward pass");
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  static constexpr int kWarpsK = kStepBytes / 32, kWarpsAcross = kThreads / 32 / kWarpsK;
  static constexpr int kPatches = kColumns / 64 / kWarpsAcross;
  static constexpr int kHeldWords = kPatches * 16;
  static constexpr bool kDown = false;
  const ByteMatrix* const x;
  const int column0;
  Bytes16 held[kPatches][4];
  __device__ __forceinline__ HeldColumns(const ByteMatrix* matrices, int, int begin)
      : x(matrices), column0(begin / kSources) {}

  __device__ static __forceinline__ unsigned group(unsigned thread) {
    return thread / 32 % kWarpsK * 8 + thread % 32 / 4;
  }
  __device__ static __forceinline__ unsigned column(unsigned thread, unsigned patch) {
    return (thread / 32 / kWarpsK + patch * kWarpsAcross) * 64 + thread % 4 * 16;
  }
  // The matrix that has columns of the tile from `column` on: of two, the first has the first 32 of every 64.
  __device__ static __forceinline__ unsigned matrix(unsigned column) { return kSources == 1 ? 0 : column / 32 % 2; }
  __device__ static __forceinline__ unsigned within(unsigned column) {
    return kSources == 1 ? column : column / 64 * 32 + column % 32;
  }

  __device__ __forceinline__ void fetch(int step, char*) {
    const unsigned thread = fresh_tid();
    const int k0 = step * kStepBytes;
#pragma unroll
    for (int i = 0; i < kPatches; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        held[i][r] =
            load16(x[matrix(column(thread, i))], k0 + 4 * group(thread) + r, column0 + within(column(thread, i)));
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

// The source of a thread's chunks of panels. Pass i of a tile is half of panel i / 2: 32 rows of k, 128 bytes each.
template <Source kSource>
struct PanelWalk {
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  static constexpr int kPanelBytes = 2 * kPanel / kSources;  // of one source
  const ByteMatrix& x;  // this thread's: of two side by side, the first has chunks 0 .. 3
  const int k, column;  // of its first chunk; column in bytes

  __device__ __forceinline__ PanelWalk(const StepsOf<kSource>& of, int step, int first, unsigned thread)
      : x((&of.matrix(step))[kSources == 1 ? 0 : thread % kChunks / 4]),
        k(of.within(step) * kPanel + int(thread / kChunks)),
        column(2 * first / kSources + int(thread % kChunks % (kChunks / kSources)) * 16) {}
  __device__ __forceinline__ int k_of(int pass) const { return k + pass % 2 * kPassRows; }
  __device__ __forceinline__ int column_of(int pass) const { return column + pass / 2 * kPanelBytes; }
};

// 16-bit elements, contiguous along m or n and aligned: cp.async.
template <int kColumns, int kThreads, Source kSource>
struct AsyncPanels {
  static_assert(kThreads / kChunks == kPassRows && kColumns % kPanel == 0, "a pass is 32 rows of a panel");
  static constexpr int kHeldWords = 0;
  static constexpr bool kDown = true;
  const StepsOf<kSource> of;
  const int column0;
  __device__ __forceinline__ AsyncPanels(const ByteMatrix* x, int first, int begin) : of{x, first}, column0(begin) {}

  __device__ __forceinline__ void fetch(int step, char* s_tile) {
    const unsigned thread = fresh_tid(), s_first = swizzled(thread / kChunks, thread % kChunks);
    const PanelWalk<kSource> walk(of, step, column0, thread);
    const int8_t* const g_first = walk.x.g_data + walk.k * walk.x.stride + walk.column;
    const int8_t* const g_second = g_first + kPassRows * walk.x.stride;
#pragma unroll
    for (int i = 0; i < kColumns / kPassRows; ++i)
      cp_async_16(s_tile + swizzled_further(s_first, i * (kPassRows / 16), 0),
                  (i % 2 ? g_second : g_first) + i / 2 * walk.kPanelBytes,
                  walk.k_of(i) < walk.x.rows && walk.column_of(i) < walk.x.columns);
  }
  __device__ __forceinline__ void stash(char*) const {}
};

// The same through registers, at any alignment and on any architecture.
template <int kColumns, int kThreads, Source kSource>
struct HeldPanels {
  static_assert(kThreads / kChunks == kPassRows && kColumns % kPanel == 0, "a pass is 32 rows of a panel");
  static constexpr int kHeldWords = kColumns / kPassRows * 4;
  static constexpr bool kDown = true;
  const StepsOf<kSource> of;
  const int column0;
  Bytes16 held[kColumns / kPassRows];
  __device__ __forceinline__ HeldPanels(const ByteMatrix* x, int first, int begin) : of{x, first}, column0(begin) {}

  __device__ __forceinline__ void fetch(int step, char*) {
    const PanelWalk<kSource> walk(of, step, column0, fresh_tid());
#pragma unroll
    for (int i = 0; i < kColumns / kPassRows; ++i) held[i] = load16(walk.x, walk.k_of(i), walk.column_of(i));
  }
  __device__ __forceinline__ void stash(char* s_tile) const {
    const unsigned thread = fresh_tid(), s_first = swizzled(thread / kChunks, thread % kChunks);
#pragma unroll
    for (int i = 0; i < kColumns / kPassRows; ++i) {
      const auto& word = held[i].word;
      *reinterpret_cast<uint4*>(s_tile + swizzled_further(s_first, i * (kPassRows / 16), 0)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

}  // namespace gemm
}  // namespace qf
