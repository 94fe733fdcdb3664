// Exchange of values between the lanes of a warp: the basis of shuffles, votes and MMAs.
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

// The values of all lanes of this warp: all lanes write, then all read. They are valid until the next gather but one,
// which no lane reaches before all have read: hence two buffers that alternate.
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
