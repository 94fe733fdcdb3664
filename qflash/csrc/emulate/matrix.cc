#include "emulate/matrix.h"

#include <cstring>

namespace emulate {

// The operands of a lane: the same kCount elements of k of rows g and g + 8 of A and of column g of B.
template <int kCount>
struct Shares {
  float a[2][kCount], b[kCount];
};

// This lane's elements of A B, without C: rows g and g + 8, columns 2 t and 2 t + 1. Four lanes have a row's elements,
// and a column's, in the same order.
template <class Sum, int kCount>
static void multiply(Sum (&c)[4], const Shares<kCount>& mine) {
  typedef float Line __attribute__((vector_size(sizeof(float) * kCount)));
  typedef Sum Sums __attribute__((vector_size(sizeof(Sum) * kCount)));
  const auto read = [](const float* from) {
    Line line;
    memcpy(&line, from, sizeof line);
    return __builtin_convertvector(line, Sums);
  };
  const auto all = gather(mine);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Sums sums[4] = {};
  for (int quad = 0; quad < 4; ++quad) {
    const Sums rows[2] = {read(all[4 * g + quad].a[0]), read(all[4 * g + quad].a[1])};
    const Sums columns[2] = {read(all[8 * t + quad].b), read(all[8 * t + 4 + quad].b)};
    for (int i = 0; i < 4; ++i) sums[i] += rows[i / 2] * columns[i % 2];
  }
  for (int i = 0; i < 4; ++i) {
    c[i] = 0;
    for (int k = 0; k < kCount; ++k) c[i] += sums[i][k];
  }
}

// Element (row, k) of A is register row / 8 + 2 (k / 8) of lane 4 (row % 8) + k % 8 / 2.
template <int kDepths, float (*kConvert)(uint16_t)>
void mma_16bit(float (&c)[4], const uint32_t (&a)[2 * kDepths], const Words<kDepths>& b) {
  spend(kMmaTime, "mma");
  Shares<2 * kDepths> mine;
  for (int i = 0; i < 2 * kDepths; ++i) {
    const int word = i / 2, shift = 16 * (i % 2);
    for (int half = 0; half < 2; ++half) mine.a[half][i] = kConvert(uint16_t(a[2 * word + half] >> shift));
    mine.b[i] = kConvert(uint16_t(b.r[word] >> shift));
  }
  double products[4];
  multiply(products, mine);
  for (int i = 0; i < 4; ++i) c[i] = float(c[i] + products[i]);
}
template void mma_16bit<1, from_f16>(float (&)[4], const uint32_t (&)[2], const Words<1>&);
template void mma_16bit<2, from_f16>(float (&)[4], const uint32_t (&)[4], const Words<2>&);
template void mma_16bit<2, from_bf16>(float (&)[4], const uint32_t (&)[4], const Words<2>&);

// Element (row, k) of A is byte k % 4 of register row / 8 + 2 (k / 16) of lane 4 (row % 8) + k % 16 / 4. Floats
// represent sums of 32 products of bytes exactly.
void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const Words<2>& b) {
  spend(kMmaTime, "mma");
  Shares<8> mine;
  for (int i = 0; i < 8; ++i) {
    const int word = i / 4, shift = 8 * (i % 4);
    for (int half = 0; half < 2; ++half) mine.a[half][i] = int8_t(a[2 * word + half] >> shift);
    mine.b[i] = int8_t(b.r[word] >> shift);
  }
  float products[4];
  multiply(products, mine);
  for (int i = 0; i < 4; ++i) c[i] += int32_t(products[i]);
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
  gather(0);  // all lanes have stored
}

}  // namespace emulate
