#include "emulate/complaint.h"

namespace emulate {

std::string complaint;

void complain(const std::string& what) {
  if (complaint.empty()) complaint = what;
}

void fail(const std::string& what) {
  complain("thread " + std::to_string(threadIdx.x) + " of block " + std::to_string(blockIdx.x) + ": " + what);
  wait_for(Waits::kForGood);
}

std::string waiting(int threads) {
  const auto what = [](const Fiber& fiber) -> std::string {
    switch (fiber.waits) {
      case Waits::kWarp:
        return "for their warp (__syncwarp)";
      case Waits::kShuffle:
        return "for their warp (a shuffle, a vote or a product)";
      case Waits::kBlock:
        return "for the block (__syncthreads)";
      case Waits::kCondition:
        return "for " + fiber.condition.name(fiber.condition.object, fiber.condition.argument);
      default:
        return "";
    }
  };
  std::string all;
  for (int first = 0, next; first < threads; first = next) {
    const std::string one = what(fibers[first]);
    for (next = first + 1; next < threads && what(fibers[next]) == one; ++next) {
    }
    if (one.empty()) continue;
    all += "; threads " + std::to_string(first) + " to " + std::to_string(next - 1) + " wait " + one;
  }
  return "block " + std::to_string(blockIdx.x) + " is stuck" + all;
}

}  // namespace emulate
