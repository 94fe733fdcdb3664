// wmma, whose fragments have an unspecified layout.
#pragma once

#include "emulate/matrix.h"

namespace emulate {

// wmma fragments: lane l holds elements 8 (l % 2) .. +7 of line l / 2, in order; lines are rows, or the columns of a B
// that is stored by columns. No GPU has this layout: a kernel that relies on one gives wrong results here.
template <int kRegisters>
void wmma_load(uint32_t (&r)[kRegisters], const void* s_from, int stride) {
  const int lane = threadIdx.x % 32;
  memset(r, 0, sizeof r);
  memcpy(r, static_cast<const uint16_t*>(s_from) + lane / 2 * stride + lane % 2 * 8, 16);
}
inline void wmma_load_sums(float (&c)[8], const float* s_from, int stride) {
  const int lane = threadIdx.x % 32;
  memcpy(c, s_from + lane / 2 * stride + lane % 2 * 8, sizeof c);
}
inline void wmma_store(float* s_to, const float (&d)[8], int stride, bool by_columns) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 8; ++i) {
    const int row = lane / 2, column = lane % 2 * 8 + i;
    s_to[by_columns ? column * stride + row : row * stride + column] = d[i];
  }
}
template <int kRegisters, class Convert>
void wmma_multiply(float (&c)[8], const uint32_t (&a)[kRegisters], const uint32_t (&b)[kRegisters], bool b_by_columns,
                   Convert convert) {
  spend(2 * kMmaTime, "mma");
  Operands<float, 8, 8> mine;
  unpack(mine.a, a, convert);
  unpack(mine.b, b, convert);
  const auto all = gather(mine);
  const int row = threadIdx.x % 32 / 2;
  for (int i = 0; i < 8; ++i) {
    const int column = threadIdx.x % 2 * 8 + i;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int line = b_by_columns ? column : k, place = b_by_columns ? k : column;
      sum += double(all[2 * row + k / 8].a[k % 8]) * all[2 * line + place / 8].b[place % 8];
    }
    c[i] = float(sum);
  }
}

}  // namespace emulate
