// A model of time, and a record of what happened when: for pictures of which warp waits for which. It is not a
// measurement: a few kinds of work take the time below, everything else takes none, and warps do not share the units of
// an SM, except its tensor cores and TMA. A unit of time is about a cycle of a Hopper SM.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulate/fiber.h"
#include "emulate/names.h"

namespace emulate {

constexpr uint64_t kExponentialTime = 12;  // a warp's exponential, 8, and its other work: scale, sum, round
constexpr uint64_t kMmaTime = 16;          // a warp's mma, from registers
constexpr uint64_t kCopyLatency = 600;     // from global memory, or the L2 cache, to shared memory
constexpr uint64_t kCopyBytes = 64;        // that TMA loads per unit of time
// Columns of a wgmma's result per unit of time, which is 64 x 16 x 2 multiplications of 16 bits, or twice as many of 8.
constexpr uint64_t kWgmmaColumns = 2;

struct Span {
  const char* kind;  // work | wait | arrive | copy | product
  int launch;
  unsigned block, warp;  // warp: of `work`, `wait` and `arrive`; warpgroup of `product`
  uint64_t begin, end;
  std::string name;
};
extern std::vector<Span> spans;
inline int launches = 0;                 // since tracing began
inline uint64_t launch_begin, last_end;  // the latest end of all

inline uint64_t now() { return self().clock; }

void record(const char* kind, unsigned warp, uint64_t begin, uint64_t end, const std::string& name);
// Lane 0 represents its warp.
void record_own(const char* kind, uint64_t begin, uint64_t end, const std::string& name);

// This thread waited from `begin` until now.
void waited(uint64_t begin, const std::string& name);

// This thread works for `time` at `at`, which may continue its last span.
void spend_timed(uint64_t time, const char* at);
inline void spend(uint64_t time, const char* at) {
  if (timed) spend_timed(time, at);
}

}  // namespace emulate
