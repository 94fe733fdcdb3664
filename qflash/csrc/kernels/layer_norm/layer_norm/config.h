// `layer_norm` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace layer_norm {

using Element = ElementOf<QF_DTYPE>::Type;

// Per thread, in their memory format. 32 / kGranule<Element> would take twice the threads for a row of 16 bits.
constexpr int kMostGranules = 8;

// Of a block on a row that is read twice: one block per SM, so that the rows in flight fit the L2 cache.
constexpr int kLongThreads = 1024, kLongGranules = 16 / kGranule<Element>;

// Rows whose squared deviations overflow are recomputed in this unit: 2^-84 leaves room for any row of finite floats.
constexpr float kSmallUnit = 5.169878828456423e-26f;
// So are rows whose squared deviations vanish, in 2^96: if the variance is below 2^-100 and eps does not dominate it.
// Different numbers of 2^20 and more have a larger variance.
constexpr float kLargeUnit = 7.922816251426434e28f, kLeastVariance = 7.888609052210118e-31f, kMostNarrow = 1048576.0f;
// Elements of float16 are too small for the former and too far apart for the latter.
constexpr bool kMayLeaveRange = QF_DTYPE != QF_F16;

}  // namespace layer_norm
}  // namespace qf
