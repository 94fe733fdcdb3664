// `cross_entropy` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time
// (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace cross_entropy {

using Element = ElementOf<QF_DTYPE>::Type;

// A thread keeps 32 elements: with 64 of 16 bits too few threads had a load in flight.
constexpr int kMostGranules = 32 / kGranule<Element>;

// Of a block on a row that does not fit its registers; nothing is read twice.
constexpr int kLongThreads = 512, kLongGranules = 4;

constexpr int kTotalThreads = 1024;  // of the one block that sums the losses
constexpr int kTotalLoads = 8;       // losses per thread in flight there

// From here on different floats are at least 64 apart, and the smaller of two adds nothing to the sum of weights.
constexpr float kHuge = 1073741824.0f;

// Logits are summed in this unit: 2^31 terms of 2^-32 times the largest float do not overflow.
constexpr float kSumUnit = 2.3283064365386963e-10f;

}  // namespace cross_entropy
}  // namespace qf
