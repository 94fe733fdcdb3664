#include "emulate/trace.h"

#include <algorithm>

namespace emulate {

std::vector<Span> spans;

void record(const char* kind, unsigned warp, uint64_t begin, uint64_t end, const std::string& name) {
  spans.push_back({kind, launches, blockIdx.x, warp, begin, end, name});
  last_end = std::max(last_end, end);
}

void record_own(const char* kind, uint64_t begin, uint64_t end, const std::string& name) {
  if (timed && threadIdx.x % 32 == 0) record(kind, threadIdx.x / 32, begin, end, name);
}

void waited(uint64_t begin, const std::string& name) {
  if (now() > begin) record_own("wait", begin, now(), name);
}

void spend_timed(uint64_t time, const char* at) {
  Fiber& fiber = self();
  fiber.clock += time;
  if (threadIdx.x % 32) return;
  if (fiber.span < spans.size()) {
    Span& last = spans[fiber.span];
    if (last.end + time == fiber.clock && last.name == at) {
      last.end = fiber.clock;
      last_end = std::max(last_end, last.end);
      return;
    }
  }
  fiber.span = spans.size();
  record("work", threadIdx.x / 32, fiber.clock - time, fiber.clock, at);
}

}  // namespace emulate
