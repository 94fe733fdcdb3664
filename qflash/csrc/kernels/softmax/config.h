// `softmax` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace softmax {

using Element = ElementOf<QF_DTYPE>::Type;

// Of a block on a row that is read twice: one block to a multiprocessor, so that the rows in flight fit the L2 cache.
constexpr int kLongThreads = 1024;

}  // namespace softmax
}  // namespace qf
