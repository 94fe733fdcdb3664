// The orthogonal Hadamard matrix of order sixteen, by which keys in INT8 pages are multiplied.
#pragma once

namespace qf {

constexpr int kHadamard = 16;

// Multiplies every sixteen channels of x[0, n) by the matrix: butterflies at distances 1, 2, 4, 8, then a quarter,
// exactly as in qflash/reference/kv_write.py. It is its own inverse. n is a multiple of sixteen.
static inline void multiply_by_hadamard(float* x, int n) {
  for (float* block = x; block < x + n; block += kHadamard) {
    for (int distance = 1; distance < kHadamard; distance *= 2)
      for (int i = 0; i < kHadamard; i++) {
        if (i & distance) continue;
        const float a = block[i], b = block[i + distance];
        block[i] = a + b, block[i + distance] = a - b;
      }
    for (int i = 0; i < kHadamard; i++) block[i] *= 0.25f;
  }
}

}  // namespace qf
