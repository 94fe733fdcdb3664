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
constexpr float kSmallUnit = 5.169878828456423e-26f;
// So are rows whose squared deviations vanish, in 2^96: where the variance is below 2^-100 and eps does not outweigh
// it. Numbers of 2^20 and more that differ have a larger one.
constexpr float kLargeUnit = 7.922816251426434e28f, kLeastVariance = 7.888609052210118e-31f, kMostNarrow = 1048576.0f;
// Those of float16 are too small for the one and too far apart for the other.
constexpr bool kMayLeaveRange = QF_DTYPE != QF_F16;

}  // namespace layer_norm
}  // namespace qf
