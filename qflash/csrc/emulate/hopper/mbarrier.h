// mbarrier: barriers that count arrivals and bytes. A wait specifies the parity of the phase that must complete.
#pragma once

#include "emulate/hopper/state.h"

namespace emulate {

void complete_if_due(MbarrierState& barrier);

void note_arrival(const MbarrierState& barrier, uint64_t time);

MbarrierState& mbarrier(uint64_t* s_barrier);

void mbarrier_init(uint64_t* s_barrier, int arrivals);

void fence_mbarrier_init();

void mbarrier_arrive(uint64_t* s_barrier, int bytes);

bool mbarrier_test(uint64_t* s_barrier, unsigned parity);

void mbarrier_wait(uint64_t* s_barrier, unsigned parity);

}  // namespace emulate
