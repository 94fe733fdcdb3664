// Tiles of 128-byte rows in shared memory, for ldmatrix: 16-byte chunk c of row r is stored at chunk c ^ swizzle(r) of
// its row, swizzle(r) = (r ^ 2 (r / 16)) mod 8.
//
// A row covers the 32 banks once, chunk c the banks 4c ..+3 ("group c"). Bank conflicts:
//   ldmatrix reads the same chunk of 8 rows that start at a multiple of 8. Unswizzled, all eight are in one group: 8
//     cycles. r mod 8 takes all eight values and r / 16 only one, so swizzled they cover the eight groups: 1 cycle.
//   16-byte stores: eight lanes write the eight chunks of a row, permuted: 1 cycle, swizzled or not.
//   4-byte stores of a transposing loader: lanes cover 8 words of k (two chunks, 2w and 2w + 1) x 4 rows 16 apart.
//     r mod 8 is the same for all, so r alone would leave them in two groups, four to a bank. 2 (r / 16) moves the four
//     rows' pairs of chunks into four different pairs of groups: 1 cycle.
// tests/unit/test_gemm_banks.py counts these.
#pragma once

namespace qf {

constexpr int kSwizzledRow = 128;  // bytes

// Byte offset of chunk `chunk` of row `row`.
__device__ __forceinline__ unsigned swizzled(unsigned row, unsigned chunk) {
  return row * kSwizzledRow + ((chunk ^ row ^ (row / 16 * 2)) & 7) * 16;
}

// swizzled(row + 16 i, chunk + 2 j) from swizzled(row, chunk), where row / 16 and i, chunk / 2 and j share no bit.
__device__ __forceinline__ unsigned swizzled_further(unsigned offset, unsigned i, unsigned j) {
  return (offset ^ ((i ^ j) % 4 * 32)) + i * 16 * kSwizzledRow;
}

}  // namespace qf
