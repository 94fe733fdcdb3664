// `layer_norm` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace layer_norm {

using Element = ElementOf<QF_DTYPE>::Type;

// Of a thread, which keeps them as they lie in memory. 32 / kGranule<Element> would be twice the threads to a row of 16
// bits.
constexpr int kMostGranules = 8;

// Of a block on a row that is read twice: one block to a multiprocessor, so that the rows in flight fit the L2 cache.
constexpr int kLongThreads = 1024, kLongGranules = 16 / kGranule<Element>;

// Rows whose squared deviations overflow are done again in this unit: 2^-84 leaves room for any row of finite floats.
// Those of float16 are too small to overflow.
constexpr bool kMayOverflow = QF_DTYPE != QF_F16;
constexpr float kSmallUnit = 5.169878828456423e-26f;

}  // namespace layer_norm
}  // namespace qf
