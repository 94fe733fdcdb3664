// `softmax` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace softmax {

using Element = ElementOf<QF_DTYPE>::Type;

// A thread keeps 32 elements as floats: more would allow fewer blocks per SM.
constexpr int kMostGranules = 32 / kGranule<Element>;

// Of a block on a row that is read twice: one block per SM, so that the rows in flight fit the L2 cache.
constexpr int kLongThreads = 1024, kLongGranules = 16 / kGranule<Element>;

}  // namespace softmax
}  // namespace qf
