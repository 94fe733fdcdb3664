// `cross_entropy` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time
// (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace cross_entropy {

using Element = ElementOf<QF_DTYPE>::Type;

// A thread keeps 32 elements: with 64 of 16 bits too few threads had a load under way.
constexpr int kMostGranules = 32 / kGranule<Element>;

// Of a block on a row that does not fit its registers; nothing is read twice.
constexpr int kLongThreads = 512, kLongGranules = 4;

constexpr int kTotalThreads = 1024;  // of the one block that adds the losses up
constexpr int kTotalLoads = 8;       // losses a thread has under way there

// From here on different floats are 64 or more apart, and the lesser of two adds nothing to the sum of weights.
constexpr float kHuge = 1073741824.0f;

// Sums of logits are taken in this unit: 2^-32 times the largest float, 2^31 times, is a float.
constexpr float kSumUnit = 2.3283064365386963e-10f;

}  // namespace cross_entropy
}  // namespace qf
