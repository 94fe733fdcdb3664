// The arithmetic of a wgmma: matrices from descriptors or registers, multiplied into sums that the tensor cores hold.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

// Computes the products of the next group that was committed.
void compute_next(Warpgroup& group);

}  // namespace emulate
