// mma.sync, ldmatrix and stmatrix. Sums of products of floats are computed in float64 and rounded once, which the
// hardware does not guarantee: results may differ from a GPU's in the last bits.
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

// With 1 or 2 blocks of k = 8.
template <int kDepths, float (*kConvert)(uint16_t)>
void mma_16bit(float (&c)[4], const uint32_t (&a)[2 * kDepths], const Words<kDepths>& b);

void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const Words<2>& b);

void mma_m8n8k16_s8(int32_t& c0, int32_t& c1, uint32_t a, uint32_t b);

void ldmatrix(uint32_t (&r)[4], const void* s_row, bool transposed);

void stmatrix(void* s_row, const uint32_t (&r)[4]);

}  // namespace emulate
