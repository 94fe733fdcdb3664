// Cuts one allocation into 64-byte aligned arrays of floats. Built twice: once to count, once to assign.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifndef QF_ISA
#error "QF_ISA must name this object's instruction set"
#endif

namespace qf {
namespace QF_ISA {

class FloatArena {
 public:
  explicit FloatArena(void* base) : base_(static_cast<char*>(base)) {}

  float* take(int64_t count) {
    float* start = base_ ? reinterpret_cast<float*>(base_ + used_) : nullptr;
    used_ += (size_t(count) * sizeof(float) + 63) & ~size_t(63);
    return start;
  }

  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace QF_ISA
}  // namespace qf
