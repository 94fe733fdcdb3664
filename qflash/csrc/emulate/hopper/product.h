// The arithmetic of a wgmma: operands from descriptors or registers, multiplied into accumulators that the tensor cores
// hold.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// Computes the next committed group.
void compute_next(Warpgroup& group);

}  // namespace emulate
