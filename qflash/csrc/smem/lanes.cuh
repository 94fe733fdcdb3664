// How a warp's lanes share a tile of rows x columns, and the row strides that keep them off each other's banks.
//
// A warp is kLanesY x kLanesX lanes. Lane (y, x) owns rows y, y + kLanesY, y + 2 kLanesY, ... and, of key columns,
// x, x + kLanesX, ...; of head-dim columns, 4x .. 4x+3, 4(x + kLanesX) .. and so on. In each step of the products below
// a lane reads 16 bytes of its 8 rows (equal for all x) and 16 bytes of its columns (equal for all y).
//
// Shared memory serves 32 banks of 4 bytes a clock, so 8 different 16-byte words of different bank groups
// (group = (address / 16) mod 8). A 16-byte load runs as two half-warps, and a half-warp takes one clock when lanes i
// and i^1, or i and i^2, ask for the same word (else two). Lane bits are dealt out for that:
//     bit 0 -> x0   bit 1 -> y0   bit 2 -> x1   bit 3 -> x2   bit 4 -> x3 (kLanesX = 16) or y1 (kLanesX = 8)
// so every load, of rows (i, i^1 agree) and of columns (i, i^2 agree), has the pairs it needs, and a half-warp asks
// for at most 8 column words and 2 row words. They lie in different groups when
//   columns at x, x+1, .. x+7 rows of K apart by a stride of an odd number of 16-byte words: K rows padded by 4 floats
//     (unpadded, a stride of 64 floats puts all eight into one group: 8 clocks instead of 1);
//   rows y, y+1: the same odd stride for Q; for P (BN + 8 or + 16 floats, below) 2 or 4 groups apart;
//   columns 4x of V: neighbours, no padding needed.
// P is written one float at a time, lanes x side by side: kLanesY segments of kLanesX banks, which tile the 32 banks
// when the row stride is kLanesX mod 32: P rows padded by kLanesX floats.
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
