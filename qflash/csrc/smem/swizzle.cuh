// Tiles in shared memory whose rows consist of 16-byte chunks. The chunks of each row are permuted so that eight
// neighbouring rows at one column lie in eight different bank groups (group = address / 16 mod 8).
//
// Without the swizzle every row of 128 bytes starts in group 0, and the 8 rows that ldmatrix reads at a column all hit
// one group: 8 passes instead of 1. With it, chunk c of row r is stored at c ^ s(r):
//   8, 16, 24, 32 chunks per row (rows start in group 0):     s = r mod 8        -> groups c^0 .. c^7
//   4, 12 chunks (even rows start in group 0, odd in 4):      s = (r / 2) mod 4  -> 4 groups in each half
//   2, 6 chunks (rows start in groups 0, 2, 4, 6 in turn):    s = (r / 4) mod 2  -> 2 groups in each quarter
// Copies write whole rows: 8 lanes at a time write 8 chunks of one row (or of two or four neighbouring short rows),
// which hit all 8 groups, since the permutation stays within the row. tests/unit/test_swizzle_banks.py counts both on
// the host.
#pragma once

#include <stdint.h>

namespace qf {

template <int kChunks>
struct Swizzle {
  static_assert(kChunks % 2 == 0, "a row must hold an even number of chunks");
  static constexpr int kWays = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;

  __device__ static __forceinline__ int phase(int row) { return row / (8 / kWays) % kWays; }
  // Byte offset of chunk `chunk` of row `row`.
  __device__ static __forceinline__ int offset(int row, int chunk) {
    return row * (16 * kChunks) + ((chunk ^ phase(row)) << 4);
  }
};

}  // namespace qf
