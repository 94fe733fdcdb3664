// What lanes of a warp show each other: the ground of shuffles, votes and products of a warp.
#pragma once

#include <new>

#include "emulate/scheduler.h"

namespace emulate {

constexpr int kExchangeBytes = 128;
alignas(kExchangeBytes) inline char exchanged[2][kMostThreads][kExchangeBytes];

template <class T>
struct Shown {
  const char (*lanes)[kExchangeBytes];
  const T& operator[](int lane) const { return *std::launder(reinterpret_cast<const T*>(lanes[lane])); }
};

// What every lane of this warp shows: all show, then all read. It stands until the next but one gather, which no lane
// reaches before all have read: hence two places, in turn.
template <class T>
Shown<T> gather(const T& mine) {
  static_assert(sizeof(T) <= kExchangeBytes, "lanes exchange at most kExchangeBytes");
  const int thread = fiber_now;
  auto& place = exchanged[fibers[thread].gathers++ % 2];
  new (place[thread]) T(mine);
  wait_for(Waits::kShuffle);
  return {place + thread / 32 * 32};
}

}  // namespace emulate
