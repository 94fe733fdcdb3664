// wgmma: asynchronous MMAs of a warpgroup. They are computed when their group is committed, or when no thread can go on
// without them: the schedule's seed decides. Accumulators read as NaN until they are waited for; to write to them, or
// to A in registers, is an error meanwhile. The warps of a warpgroup must start, commit and wait for the same wgmmas in
// the same order.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

void start_product(float* sums, Product wanted, const uint32_t* a_registers);

void wgmma_fence();

void wgmma_copy(int copy);

void wgmma_commit();

void wgmma_wait(int pending);

}  // namespace emulate
