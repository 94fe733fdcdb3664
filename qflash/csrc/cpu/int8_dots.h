// The INT8 building blocks of this object's instruction set.
#pragma once

#if defined(__AVX512F__)
#include "int8_dots_avx512.h"
#elif defined(__AVX2__)
#include "int8_dots_avx2.h"
#else
#include "int8_dots_generic.h"
#endif

namespace qf {
namespace QF_ISA {

// Bytes between rows of a step's scores, later its weights. Not a power of two: rows must not share low address bits.
constexpr int kScoreStride = kStepKeys * 4 + 64;

}  // namespace QF_ISA
}  // namespace qf
