// Tiles in shared memory as TMA writes them and wgmma reads them: panels of 128-byte rows, stored consecutively, with
// 16-byte chunks permuted within every 8 rows (the 128-byte swizzle); panels follow each other. A panel starts at a
// multiple of 1024 bytes.
//
//   bytes of a panel:  row 0: chunks 0 1 2 3 4 5 6 7   row 1: chunks 1 0 3 2 5 4 7 6   ..   row 8: as row 0
//
// Rows of 64 bytes make panels of another kind (the 64-byte swizzle): two rows take the place of one, and pairs of rows
// are permuted alike.
//
//   bytes of a panel:  rows 0, 1: chunks 0 1 2 3   rows 2, 3: chunks 1 0 3 2   ..   row 8: as row 0
//
// Both are what smem/swizzle.cuh does to rows of 8 and of 4 chunks.
#pragma once

#include "ptx/mbarrier.cuh"

namespace qf {

constexpr int kSwizzleBytes = 1024;  // panels begin at multiples of this

// kRows rows of kColumns elements. kBytesOfRow: bytes of a row in a panel.
template <int kRows, int kColumns, int kElementBytes = 2, int kBytesOfRow = kColumns * kElementBytes <= 64 ? 64 : 128>
struct Panels {
  static constexpr int kRowBytes = kBytesOfRow;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPanelColumns = kRowBytes / kElementBytes;
  static constexpr int kCount = (kColumns + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kCount * kPanelBytes;
  static_assert(kRows % 8 == 0 && kPanelBytes % kSwizzleBytes == 0, "the swizzle repeats every 8 rows");
};

// A matrix in shared memory, as wgmma takes it. Only the address differs between the k steps of an MMA.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
template <class Tile>
struct Descriptor {
  uint32_t low;  // address and distance of panels, in units of 16 bytes

  // Warp-uniform.
  __device__ __forceinline__ Descriptor(const char* s_tile, int panel_bytes)
      : low(uint32_t(panel_bytes >> 4) << 16 | (shared_address(s_tile) >> 4 & 0x3fff)) {}
  __device__ __forceinline__ void move_tiles(int tiles) { low += uint32_t(tiles) * uint32_t(Tile::kBytes >> 4); }
  __device__ __forceinline__ uint64_t plus(int bytes) const {
    constexpr uint32_t kSwizzle = uint32_t(Tile::kRowBytes == 128 ? 1 : 2) << 30, kEightRows = 8 * Tile::kRowBytes >> 4;
    return uint64_t(kSwizzle | kEightRows) << 32 | (low + uint32_t(bytes >> 4));
  }
};

// Rows of a tile as rows of A or columns of B: step k sums over bytes 32 k .. 32 k + 31 of them.
template <class Tile>
struct AlongRows : Descriptor<Tile> {
  __device__ __forceinline__ explicit AlongRows(const char* s_tile) : Descriptor<Tile>(s_tile, 16) {}
  __device__ __forceinline__ AlongRows later(int tiles) const {
    AlongRows x = *this;
    x.move_tiles(tiles);
    return x;
  }
  __device__ __forceinline__ uint64_t step(int k) const {
    constexpr int kSteps = Tile::kRowBytes / 32;  // in a panel
    return this->plus(k / kSteps * Tile::kPanelBytes + k % kSteps * 32);
  }
};

// Columns of a tile of 16-bit elements as columns of a transposed B: step k sums over rows 16 k .. 16 k + 15.
template <class Tile>
struct AlongColumns : Descriptor<Tile> {
  __device__ __forceinline__ explicit AlongColumns(const char* s_tile) : Descriptor<Tile>(s_tile, Tile::kPanelBytes) {}
  __device__ __forceinline__ AlongColumns later(int tiles) const {
    AlongColumns x = *this;
    x.move_tiles(tiles);
    return x;
  }
  __device__ __forceinline__ uint64_t step(int k) const { return this->plus(k * 16 * Tile::kRowBytes); }
};

}  // namespace qf
