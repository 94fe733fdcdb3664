// `cross_entropy_bwd` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time
// (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace cross_entropy_bwd {

using Element = ElementOf<QF_DTYPE>::Type;

constexpr int kMostGranules = 32 / kGranule<Element>;

// Of a block on a row that does not fit its registers; nothing is read twice.
constexpr int kLongThreads = 512, kLongGranules = 4;

constexpr int kCountThreads = 1024;  // of the one block that counts rows

}  // namespace cross_entropy_bwd
}  // namespace qf
