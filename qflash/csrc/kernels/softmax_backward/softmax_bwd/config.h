// `softmax_bwd` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace softmax_bwd {

using Element = ElementOf<QF_DTYPE>::Type;

// A thread keeps 32 elements of each of two rows.
constexpr int kMostGranules = 32 / kGranule<Element>;

// Of rows that stay in registers: two of float32 are too much for 64 registers per thread in a block of 1024 threads.
constexpr int kMostColumns = sizeof(Element) == 4 ? kWholeColumns / 2 : kWholeColumns;

// Of a block on rows that are read twice: one block per SM, so that the rows in flight fit the L2 cache.
constexpr int kLongThreads = 1024, kLongGranules = 16 / kGranule<Element>;

}  // namespace softmax_bwd
}  // namespace qf
