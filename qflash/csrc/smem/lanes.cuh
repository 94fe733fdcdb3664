// How a tile of rows x columns is distributed over a warp's lanes, and row strides that avoid bank conflicts.
//
// A warp is kLanesY x kLanesX lanes. Lane (y, x) owns rows y, y + kLanesY, y + 2 kLanesY, ... and, of key columns,
// x, x + kLanesX, ...; of head-dim columns, 4x .. 4x+3, 4(x + kLanesX) .. and so on. In each step of a matrix product
// a lane reads 16 bytes of its 8 rows (the same for all x) and 16 bytes of its columns (the same for all y).
//
// Shared memory has 32 banks that each deliver 4 bytes per cycle: 8 different 16-byte words if their bank groups differ
// (group = (address / 16) mod 8). A 16-byte load runs as two half-warps, and a half-warp takes one cycle if lanes i and
// i^1, or i and i^2, read the same word (else two). The lane bits are assigned accordingly:
//     bit 0 -> x0   bit 1 -> y0   bit 2 -> x1   bit 3 -> x2   bit 4 -> x3 (kLanesX = 16) or y1 (kLanesX = 8)
// Every load, of rows (i, i^1 agree) or of columns (i, i^2 agree), thus has the pairs it needs, and a half-warp reads
// at most 8 column words and 2 row words. Their groups differ if
//   columns x, x+1, .. x+7, which are rows of K, are an odd number of 16-byte words apart: K rows padded by 4 floats
//     (unpadded, a stride of 64 floats puts all eight into one group: 8 cycles instead of 1);
//   rows y, y+1 have the same odd stride for Q; for P (BN + 8 or + 16 floats, below) they are 2 or 4 groups apart;
//   columns 4x of V are contiguous: no padding needed.
// P is written one float at a time, neighbouring x contiguous: kLanesY segments of kLanesX banks, which cover the 32
// banks if the row stride is kLanesX mod 32: P rows padded by kLanesX floats.
// The host-side model in tests/unit/test_smem_banks.py counts these conflicts.
#pragma once

namespace qf {

template <int X>
struct Lanes {
  static constexpr int kLanesX = X, kLanesY = 32 / X;
  static_assert(X == 8 || X == 16, "lane bits are dealt out for 8 or 16 lanes across");

  __device__ static __forceinline__ int x(int lane) {
    const int low = (lane & 1) | ((lane >> 1) & 6);
    return X == 16 ? low | ((lane >> 1) & 8) : low;
  }
  __device__ static __forceinline__ int y(int lane) {
    const int low = (lane >> 1) & 1;
    return X == 16 ? low : low | ((lane >> 3) & 2);
  }
};

constexpr int padded_row(int columns) { return columns + 4; }  // Q and K: an odd number of 16-byte words
constexpr int score_row(int columns, int lanes_x) { return columns + lanes_x; }  // P

}  // namespace qf
