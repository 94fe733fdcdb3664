// cp.async: copies arrive when they are waited for and not before. To wait is of a thread; others see them after a
// barrier.
#pragma once

#include <cstring>

#include "emulate/scheduler.h"

namespace emulate {

inline void cp_async(void* to, const void* from, int bytes, bool valid) {
  self().issued.push_back({to, from, bytes, valid});
}
inline void cp_async_commit() {
  Fiber& fiber = self();
  fiber.groups.push_back(std::move(fiber.issued));
  fiber.issued.clear();
}
inline void cp_async_wait(int pending) {
  auto& groups = self().groups;
  while (int(groups.size()) > pending) {
    for (const ThreadCopy& copy : groups.front()) {
      if (copy.valid)
        memcpy(copy.to, copy.from, copy.bytes);
      else
        memset(copy.to, 0, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace emulate
