// Tiles in shared memory as the copy engine leaves them and wgmma reads them: panels of 64 channels (128 bytes), rows
// one after another in a panel, 16-byte chunks permuted within every 8 rows (the 128-byte swizzle), panels one after
// another. A panel starts at a multiple of 1024 bytes.
//
//   bytes of a panel:  row 0: chunks 0 1 2 3 4 5 6 7   row 1: chunks 1 0 3 2 5 4 7 6   ..   row 8: as row 0
#pragma once

#include "ptx/mbarrier.cuh"

namespace qf {

constexpr int kPanelChannels = 64, kPanelRowBytes = 128, kSwizzleBytes = 1024;  // 8 rows

template <int kRows, int kHeadDim>
struct Panels {
  static constexpr int kCount = (kHeadDim + kPanelChannels - 1) / kPanelChannels;
  static constexpr int kPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kBytes = kCount * kPanelBytes;
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
};

// A matrix in shared memory, as wgmma takes it. What differs between the steps of a product is its address.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
struct Descriptor {
  uint32_t low;  // address, and distance of panels, in 16 bytes

  // The same for all threads of a warp.
  __device__ __forceinline__ Descriptor(const char* s_tile, int panel_bytes)
      : low(uint32_t(panel_bytes >> 4) << 16 | (shared_address(s_tile) >> 4 & 0x3fff)) {}
  // The same matrix in the tile so many further.
  template <class Tile>
  __device__ __forceinline__ Descriptor plus_tiles(int tiles) const {
    Descriptor x = *this;
    x.low += uint32_t(tiles) * uint32_t(Tile::kBytes >> 4);
    return x;
  }
  __device__ __forceinline__ uint64_t plus(int bytes) const {
    constexpr uint32_t kSwizzle128 = uint32_t(1) << 30, kEightRows = kSwizzleBytes >> 4;
    return uint64_t(kSwizzle128 | kEightRows) << 32 | (low + uint32_t(bytes >> 4));
  }
};

// Rows of a tile as rows of A or columns of B: step k sums over channels 16 k .. 16 k + 15.
template <class Tile>
struct AlongRows : Descriptor {
  __device__ __forceinline__ explicit AlongRows(const char* s_tile) : Descriptor(s_tile, 16) {}
  __device__ __forceinline__ AlongRows(Descriptor x) : Descriptor(x) {}
  __device__ __forceinline__ AlongRows later(int tiles) const { return {plus_tiles<Tile>(tiles)}; }
  __device__ __forceinline__ uint64_t step(int k) const { return plus(k / 4 * Tile::kPanelBytes + k % 4 * 32); }
};

// Channels of a tile as columns of a transposed B: step k sums over rows 16 k .. 16 k + 15.
template <class Tile>
struct AlongChannels : Descriptor {
  __device__ __forceinline__ explicit AlongChannels(const char* s_tile) : Descriptor(s_tile, Tile::kPanelBytes) {}
  __device__ __forceinline__ AlongChannels(Descriptor x) : Descriptor(x) {}
  __device__ __forceinline__ AlongChannels later(int tiles) const { return {plus_tiles<Tile>(tiles)}; }
  __device__ __forceinline__ uint64_t step(int k) const { return plus(k * 2 * kSwizzleBytes); }
};

}  // namespace qf
