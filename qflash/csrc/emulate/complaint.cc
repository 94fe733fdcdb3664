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

std::string waiting() {
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
  for (int rank = 0; rank < cluster_blocks; ++rank) {
    const Fiber* const threads = fibers + rank * block_threads;
    if (block_is_done(rank)) continue;
    all += (all.empty() ? "block " : "; block ") + std::to_string(first_block + unsigned(rank)) + " is stuck";
    for (int first = 0, next; first < block_threads; first = next) {
      const std::string one = what(threads[first]);
      for (next = first + 1; next < block_threads && what(threads[next]) == one; ++next) {
      }
      if (one.empty()) continue;
      all += "; threads " + std::to_string(first) + " to " + std::to_string(next - 1) + " wait " + one;
    }
  }
  return all;
}

}  // namespace emulate
