// Events in a block, for an observer: a trace, a count. There is none unless `observer` is set.
#pragma once

#include <cstdint>

#include "emulate/types.h"

namespace emulate {

enum class Waits { kNot, kWarp, kShuffle, kBlock, kCondition, kForGood, kDone };

struct Event {
  enum Kind {
    kBlockBegins,     // detail: threads
    kBlockEnds,       // detail: 1 if it is stuck
    kRuns,            // a thread goes on
    kWaits,           // detail: a Waits; if kCondition, the fiber's condition specifies for what
    kArrives,         // at an mbarrier; object: the barrier; detail: bytes that it also expects
    kCopyStarts,      // object: the destination in shared memory; detail: bytes
    kCopyArrives,     // as above; it happens between turns, so `thread` has no meaning
    kProductsCommit,  // of wgmma; detail: the group, counted per warpgroup
    kProductsFinish,  // object: the first thread of the warpgroup, as a number; detail: the group
  };
  Kind kind;
  uint64_t time;  // turns of threads since the launch began: not a unit of any clock
  unsigned block, thread;
  const void* object;
  int64_t detail;
};

inline uint64_t turns = 0;
inline void (*observer)(const Event&) = nullptr;

inline void observe(Event::Kind kind, int64_t detail, const void* object = nullptr) {
  if (observer) observer({kind, turns, blockIdx.x, threadIdx.x, object, detail});
}

}  // namespace emulate
