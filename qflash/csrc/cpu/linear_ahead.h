// Prefetches the part of a weight that is packed next while this one is packed and multiplied: with few rows of x the
// product waits for memory, and memory must not wait for the product.
#pragma once

#include <stdint.h>

#ifndef QF_ISA
#error "QF_ISA must name this object's instruction set"
#endif

namespace qf {
namespace QF_ISA {

// Into the core's own cache, but not the first level. Any address will do: one outside of all memory is ignored.
static inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// Runs of memory, `stride` bytes apart, one cache line per step.
class LinesAhead {
 public:
  static constexpr int kLine = 64;

  LinesAhead() = default;
  LinesAhead(const void* first, int64_t stride, int runs, int64_t bytes)
      : run_(static_cast<const char*>(first)), stride_(stride), runs_(runs), bytes_(bytes) {}

  void step() {
    if (runs_ == 0) return;
    prefetch_far(run_ + at_);
    at_ += kLine;
    if (at_ < bytes_) return;
    at_ = 0;
    run_ += stride_;
    runs_--;
  }

 private:
  const char* run_ = nullptr;
  int64_t stride_ = 0;
  int runs_ = 0;
  int64_t bytes_ = 0, at_ = 0;
};

// What a product prefetches: lines of the next panel, one per step, and of what comes after the chunk, some per tile.
struct Wanted {
  static constexpr int kLinesOfTile = 16;

  LinesAhead panel;
  LinesAhead& after;

  void step() { panel.step(); }
  void tile() {
    for (int i = 0; i < kLinesOfTile; i++) after.step();
  }
};

}  // namespace QF_ISA
}  // namespace qf
