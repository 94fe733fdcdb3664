// A model of time, and what happened when: for pictures of who waits for whom. It is no measurement: a few kinds of
// work take the time below, everything else takes none, and warps do not share the units of a multiprocessor, but for
// its tensor cores and its copy engine. Units are about the clocks of a Hopper multiprocessor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulate/fiber.h"
#include "emulate/names.h"

namespace emulate {

constexpr uint64_t kExponentialTime = 12;  // a warp's exponential, 8, and what goes with it: scale, sum, round
constexpr uint64_t kMmaTime = 16;          // a warp's mma, from registers
constexpr uint64_t kCopyLatency = 600;     // from global memory, or the L2 cache, to shared memory
constexpr uint64_t kCopyBytes = 64;        // that the copy engine brings in a unit of time
// Columns of a wgmma's result for a unit of time, which is 64 x 16 x 2 multiplications of 16 bits, or twice as many
// of 8.
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
// Lane 0 stands for its warp.
void record_own(const char* kind, uint64_t begin, uint64_t end, const std::string& name);

// This thread waited from `begin` until now.
void waited(uint64_t begin, const std::string& name);

// This thread works for so long, at what it did before or at something else.
void spend_timed(uint64_t time, const char* at);
inline void spend(uint64_t time, const char* at) {
  if (timed) spend_timed(time, at);
}

}  // namespace emulate
