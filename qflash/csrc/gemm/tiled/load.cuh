// Loads of a tile of x or w into shared memory, as words [kGroups][128] that are contiguous along rows (of w: columns),
// so that four of them are one 16-byte load. fetch(step) loads a step's share into registers, stash(s_tile) stores it.
// Of two matrices side by side, the tile's first 64 columns belong to the first and the others to the second.
#pragma once

#include "gemm/bytes.cuh"
#include "gemm/tiled/config.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace gemm {

// The index of word (group, row) in a tile: rows in order, except for two exclusive ors that keep fours together.
//   8 (group / 4 % 4): a warp stashes word j of 8 rows x 4 chunks, from groups 4c + j (16-bit elements: of 16 rows x 2
//     chunks, groups 8c + j). Without it the chunks conflict in the same banks; with it chunk c is 8c (16c) banks
//     further and the 32 words cover the 32 banks.
//   4 (row / 32 % 4): eight lanes stash four words each, 16 rows apart (int8 along n) or 8 (16-bit elements). Without
//     it they use only two (four) of the eight groups of four banks; with it they cover all eight.
// Readers load four rows from 4x, x = 0..7 of an aligned 32: those move together or trade places within the 32.
__device__ __forceinline__ unsigned place(unsigned group, unsigned row) {
  return group * kTiledBlock + (row ^ (group / 4 % 4 * 8) ^ (row / 32 % 4 * 4));
}

// Words of a 16-byte chunk: four, or eight for 16-bit elements.
template <class Element>
constexpr int kWordsPerChunk = sizeof(Element) == 2 ? 8 : 4;

template <class Element>
__device__ __forceinline__ uint32_t word_of(const Bytes16& chunk, int i) {
  if constexpr (sizeof(Element) == 2)
    return float_to_bits(to_float(Element{uint16_t(chunk.word[i / 2] >> 16 * (i % 2))}));
  else
    return chunk.word[i];
}

// Contiguous along k.
template <class Config, Source kSource_>
struct RowsTile {
  using Element = typename Config::Element;
  static constexpr int kWords = kWordsPerChunk<Element>, kChunksPerRow = kGroups / kWords;
  static constexpr int kRowsPerPass = kTiledThreads / kChunksPerRow, kPasses = kTiledBlock / kRowsPerPass;
  static constexpr Source kSource = kSource_;
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  const StepsOf<kSource> of;
  const int row0;
  Bytes16 held[kPasses];
  __device__ __forceinline__ RowsTile(const ByteMatrix* x, int first, int begin)
      : of{x, first}, row0(begin / kSources) {}

  __device__ __forceinline__ void fetch(int step) {
    const unsigned thread = fresh_tid(), row = thread / kChunksPerRow, chunk = thread % kChunksPerRow;
    const ByteMatrix& x = of.matrix(step);
    const int column = of.within(step) * kChunksPerRow * 16 + chunk * 16;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if constexpr (kSources == 1)
        held[i] = load16(x, row0 + row + i * kRowsPerPass, column);
      else if constexpr (kPasses == 2)  // one pass for each matrix
        held[i] = load16((&x)[i], row0 + row, column);
      else
        held[i] = load16((&x)[row / 64], row0 + row % 64, column);
    }
  }

  __device__ __forceinline__ void stash(uint32_t* s_tile) const {
    const unsigned thread = fresh_tid(), chunk = thread % kChunksPerRow;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        s_tile[place(chunk * kWords + j, thread / kChunksPerRow + i * kRowsPerPass)] = word_of<Element>(held[i], j);
  }
};

// Floats of any size, contiguous along m or n: chunks are stored in their memory order.
template <class Config, Source kSource_>
struct ColumnsTile {
  using Element = typename Config::Element;
  static constexpr int kWords = kWordsPerChunk<Element>, kAcross = kTiledBlock / kWords;
  static constexpr int kDown = kTiledThreads / kAcross, kPasses = kGroups / kDown;
  static constexpr Source kSource = kSource_;
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  const StepsOf<kSource> of;
  const int column0;
  Bytes16 held[kPasses];
  __device__ __forceinline__ ColumnsTile(const ByteMatrix* x, int first, int begin)
      : of{x, first}, column0(begin / kSources * int(sizeof(Element))) {}

  __device__ __forceinline__ void fetch(int step) {
    const unsigned thread = fresh_tid(), across = thread % kAcross;
    const ByteMatrix& x = (&of.matrix(step))[kSources == 1 ? 0 : across / (kAcross / 2)];
    const int column = column0 + across % (kAcross / kSources) * 16;
    const int k0 = of.within(step) * kGroups + thread / kAcross;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) held[i] = load16(x, k0 + i * kDown, column);
  }

  __device__ __forceinline__ void stash(uint32_t* s_tile) const {
    const unsigned thread = fresh_tid(), group = thread / kAcross, column = thread % kAcross * kWords;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < kWords; j += 4)
        *reinterpret_cast<uint4*>(s_tile + place(group + i * kDown, column + j)) =
            make_uint4(word_of<Element>(held[i], j), word_of<Element>(held[i], j + 1), word_of<Element>(held[i], j + 2),
                       word_of<Element>(held[i], j + 3));
  }
};

// int8, contiguous along n: half of the threads load 4 k x 16 n each and transpose them to 16 contiguous words.
template <class Config, Source kSource_>
struct TransposedTile {
  static constexpr Source kSource = kSource_;
  static_assert(kSource != Source::kChained, "integers have no backward pass");
  static constexpr int kAcross = kTiledBlock / 16, kWorkers = kGroups * kAcross;
  static constexpr int kSources = kSource == Source::kPaired ? 2 : 1;
  const ByteMatrix* const x;
  const int column0;
  Bytes16 held[4];
  __device__ __forceinline__ TransposedTile(const ByteMatrix* matrices, int, int begin)
      : x(matrices), column0(begin / kSources) {}

  __device__ __forceinline__ void fetch(int step) {
    const unsigned thread = fresh_tid(), group = thread / kAcross, across = thread % kAcross;
    if (thread >= kWorkers) return;
    const ByteMatrix& from = x[kSources == 1 ? 0 : across / (kAcross / 2)];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      held[r] = load16(from, step * 4 * kGroups + 4 * group + r, column0 + 16 * (across % (kAcross / kSources)));
  }

  __device__ __forceinline__ void stash(uint32_t* s_tile) const {
    const unsigned thread = fresh_tid(), group = thread / kAcross, across = thread % kAcross;
    if (thread >= kWorkers) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t word[4];
      transpose4x4(word, held[0].word[i], held[1].word[i], held[2].word[i], held[3].word[i]);
      *reinterpret_cast<uint4*>(s_tile + place(group, 16 * across + 4 * i)) =
          make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

}  // namespace gemm
}  // namespace qf
