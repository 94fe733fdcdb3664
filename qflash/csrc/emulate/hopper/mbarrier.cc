#include "emulate/hopper/mbarrier.h"

#include <algorithm>
#include <new>
#include <string>

#include "emulate/complaint.h"
#include "emulate/names.h"
#include "emulate/trace.h"

namespace emulate {

void complete_if_due(MbarrierState& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.parity ^= 1;
  if (timed) {
    auto& times = hopper.times[&barrier];
    times = {0, times.arrival};
  }
  barrier.pending = barrier.arrivals;
}

void note_arrival(const MbarrierState& barrier, uint64_t time) {
  if (timed) hopper.times[&barrier].arrival = std::max(hopper.times[&barrier].arrival, time);
}

MbarrierState& mbarrier(uint64_t* s_barrier) {
  if (!used_hopper().barriers.count(s_barrier)) fail("no mbarrier was initialised " + at_byte(s_barrier));
  return *std::launder(reinterpret_cast<MbarrierState*>(s_barrier));
}

void mbarrier_init(uint64_t* s_barrier, int arrivals) {
  used_hopper().barriers.insert(s_barrier);
  hopper.unfenced.insert(s_barrier);
  new (s_barrier) MbarrierState{0, uint16_t(arrivals), uint16_t(arrivals), 0};
}

void fence_mbarrier_init() { used_hopper().unfenced.clear(); }

void mbarrier_arrive(uint64_t* s_barrier, int bytes) {
  MbarrierState& barrier = mbarrier(s_barrier);
  if (barrier.pending == 0) fail("one arrival too many at the mbarrier " + at_byte(s_barrier));
  observe(Event::kArrives, bytes, s_barrier);
  note_arrival(barrier, now());
  record_own("arrive", now(), now(), barrier_name(s_barrier));
  barrier.bytes += bytes;
  --barrier.pending;
  complete_if_due(barrier);
}

bool mbarrier_test(uint64_t* s_barrier, unsigned parity) {
  return mbarrier(s_barrier).parity != parity && (!timed || hopper.times[s_barrier].completed <= now());
}

void mbarrier_wait(uint64_t* s_barrier, unsigned parity) {
  mbarrier(s_barrier);
  Condition condition;
  condition.happened = [](const void* object, unsigned parity) {
    return static_cast<const MbarrierState*>(object)->parity != parity;
  };
  condition.name = [](const void* object, unsigned parity) {
    const auto& now = *static_cast<const MbarrierState*>(object);
    return "parity " + std::to_string(parity) + " of the mbarrier " + at_byte(object) + " (" +
           std::to_string(now.pending) + " arrivals and " + std::to_string(now.bytes) + " bytes to come)";
  };
  condition.object = s_barrier;
  condition.argument = parity;
  condition.since = [](const void* object, unsigned) { return hopper.times[object].completed; };
  const uint64_t begin = now();
  wait_for(condition);
  waited(begin, barrier_name(s_barrier));
}

}  // namespace emulate
