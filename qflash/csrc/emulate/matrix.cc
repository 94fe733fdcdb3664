#include "emulate/matrix.h"

#include <cstring>

namespace emulate {

// Element (row, k) of A is register row / 8 + 2 (k / 8) of lane 4 (row % 8) + k % 8 / 2.
template <int kDepths>
void mma_16bit(float (&c)[4], const uint32_t (&a)[2 * kDepths], const Words<kDepths>& b, float (*convert)(uint16_t)) {
  spend(kMmaTime, "mma");
  Operands<float, 4 * kDepths, 2 * kDepths> mine;
  unpack(mine.a, a, convert);
  unpack(mine.b, b.r, convert);
  const auto all = gather(mine);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  double sums[4] = {c[0], c[1], c[2], c[3]};  // of rows g and g + 8, columns 2 t and 2 t + 1
  for (int depth = 0; depth < kDepths; ++depth)
    for (int pair = 0; pair < 4; ++pair) {
      const float* const rows = all[4 * g + pair].a + 4 * depth;
      const float* const columns[2] = {all[8 * t + pair].b + 2 * depth, all[8 * t + 4 + pair].b + 2 * depth};
      for (int i = 0; i < 4; ++i) {
        sums[i] += double(rows[i / 2 * 2]) * columns[i % 2][0];
        sums[i] += double(rows[i / 2 * 2 + 1]) * columns[i % 2][1];
      }
    }
  for (int i = 0; i < 4; ++i) c[i] = float(sums[i]);
}
template void mma_16bit<1>(float (&)[4], const uint32_t (&)[2], const Words<1>&, float (*)(uint16_t));
template void mma_16bit<2>(float (&)[4], const uint32_t (&)[4], const Words<2>&, float (*)(uint16_t));

void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const Words<2>& b) {
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

void mma_m8n8k16_s8(int32_t& c0, int32_t& c1, uint32_t a, uint32_t b) {
  const auto all = gather(Operands<uint32_t, 1, 1>{{a}, {b}});
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int k = 0; k < 16; ++k) {
    const int8_t x = all[g * 4 + k / 4].a[0] >> 8 * (k % 4);
    c0 += int32_t(x) * int8_t(all[2 * t * 4 + k / 4].b[0] >> 8 * (k % 4));
    c1 += int32_t(x) * int8_t(all[(2 * t + 1) * 4 + k / 4].b[0] >> 8 * (k % 4));
  }
}

void ldmatrix(uint32_t (&r)[4], const void* s_row, bool transposed) {
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

void stmatrix(void* s_row, const uint32_t (&r)[4]) {
  const auto rows = gather(s_row);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) memcpy(static_cast<char*>(rows[8 * i + lane / 4]) + 4 * (lane % 4), &r[i], 4);
  gather(0);  // all is in place
}

}  // namespace emulate
