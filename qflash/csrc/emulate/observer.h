// What happens in a block, for whoever watches: a trace, a count. Nobody watches unless `observer` is set.
#pragma once

#include <cstdint>

#include "emulate/types.h"

namespace emulate {

enum class Waits { kNot, kWarp, kShuffle, kBlock, kCondition, kForGood, kDone };

struct Event {
  enum Kind {
    kBlockBegins,     // detail: threads
    kBlockEnds,       // detail: 1 where it is stuck
    kRuns,            // a thread goes on
    kWaits,           // detail: a Waits; where it is kCondition, the fiber's condition says for what
    kArrives,         // at an mbarrier; object: the barrier; detail: bytes it expects besides
    kCopyStarts,      // object: where it goes in shared memory; detail: bytes
    kCopyArrives,     // as above; it happens between turns, so `thread` says nothing
    kProductsCommit,  // of wgmma; detail: the group, counted by its warpgroup
    kProductsFinish,  // object: the first thread of the warpgroup, as a number; detail: the group
  };
  Kind kind;
  uint64_t time;  // turns that threads have had since the launch began: no unit of any clock
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
