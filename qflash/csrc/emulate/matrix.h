// mma.sync, ldmatrix and stmatrix. Sums of products of floats are taken in float64 and rounded once, which the hardware
// does not promise: results may differ from a GPU's in the last bits.
#pragma once

#include "emulate/floats.h"
#include "emulate/trace.h"
#include "emulate/warp.h"

namespace emulate {

template <int kRegisters>
struct Words {
  uint32_t r[kRegisters];
};
template <class T, int kA, int kB>
struct Operands {
  T a[kA], b[kB];
};
template <int kElements, class Convert>
void unpack(float (&to)[kElements], const uint32_t* from, Convert convert) {
  for (int i = 0; i < kElements; ++i) to[i] = convert(uint16_t(from[i / 2] >> 16 * (i % 2)));
}

// kDepths blocks of k = 8: element (row, k) of A is register row / 8 + 2 (k / 8) of lane 4 (row % 8) + k % 8 / 2.
template <int kDepths, class Convert>
void mma_16bit(float (&c)[4], const uint32_t (&a)[2 * kDepths], const Words<kDepths>& b, Convert convert) {
  spend(kMmaTime, "mma");
  Operands<float, 4 * kDepths, 2 * kDepths> mine;
  unpack(mine.a, a, convert);
  unpack(mine.b, b.r, convert);
  const auto all = gather(mine);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 8 * kDepths; ++k)
      sum += double(all[row % 8 * 4 + k % 8 / 2].a[2 * (row / 8 + 2 * (k / 8)) + k % 2]) *
             all[column * 4 + k % 8 / 2].b[2 * (k / 8) + k % 2];
    c[i] = float(sum);
  }
}

inline void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const Words<2>& b) {
  spend(kMmaTime, "mma");
  Operands<uint32_t, 4, 2> mine;
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b.r, sizeof mine.b);
  const auto all = gather(mine);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const uint32_t x = all[row % 8 * 4 + k % 16 / 4].a[row / 8 + 2 * (k / 16)];
      const uint32_t y = all[column * 4 + k % 16 / 4].b[k / 16];
      c[i] += int32_t(int8_t(x >> 8 * (k % 4))) * int8_t(y >> 8 * (k % 4));
    }
  }
}

inline void mma_m8n8k16_s8(int32_t& c0, int32_t& c1, uint32_t a, uint32_t b) {
  const auto all = gather(Operands<uint32_t, 1, 1>{{a}, {b}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 16; ++k) {
    const int8_t x = all[g * 4 + k / 4].a[0] >> 8 * (k % 4);
    c0 += int32_t(x) * int8_t(all[2 * t * 4 + k / 4].b[0] >> 8 * (k % 4));
    c1 += int32_t(x) * int8_t(all[(2 * t + 1) * 4 + k / 4].b[0] >> 8 * (k % 4));
  }
}

inline void ldmatrix(uint32_t (&r)[4], const void* s_row, bool transposed) {
  const auto rows = gather(s_row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? 2 * (lane % 4) + e : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + e;
      memcpy(&pair[e], static_cast<const char*>(rows[8 * i + row]) + 2 * column, 2);
    }
    r[i] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
  }
}

inline void stmatrix(void* s_row, const uint32_t (&r)[4]) {
  const auto rows = gather(s_row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) memcpy(static_cast<char*>(rows[8 * i + lane / 4]) + 4 * (lane % 4), &r[i], 4);
  gather(0);  // all is in place
}

}  // namespace emulate
