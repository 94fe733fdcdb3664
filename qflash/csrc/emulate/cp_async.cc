#include "emulate/cp_async.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "emulate/fiber.h"
#include "emulate/trace.h"

namespace emulate {

void cp_async(void* to, const void* from, int bytes, bool valid) { self().issued.push_back({to, from, bytes, valid}); }

void cp_async_commit() {
  Fiber& fiber = self();
  fiber.groups.push_back(std::move(fiber.issued));
  fiber.issued.clear();
  fiber.arrivals.push_back(fiber.clock + kCopyLatency);
}

void cp_async_wait(int pending) {
  auto& groups = self().groups;
  while (int(groups.size()) > pending) {
    for (const ThreadCopy& copy : groups.front()) {
      if (copy.valid)
        memcpy(copy.to, copy.from, copy.bytes);
      else
        memset(copy.to, 0, copy.bytes);
    }
    groups.erase(groups.begin());
    Fiber& fiber = self();
    const uint64_t begin = fiber.clock;
    fiber.clock = std::max(fiber.clock, fiber.arrivals.front());
    fiber.arrivals.erase(fiber.arrivals.begin());
    waited(begin, "cp.async");
  }
}

}  // namespace emulate
