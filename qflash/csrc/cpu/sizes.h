// Sizes that every kernel of the engine shares.
#pragma once

#include <stdint.h>

namespace qf {

constexpr int kMaxHeadDim = 256;  // rows on the stack have this many channels: check_values lets no more through

static inline int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
static inline int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

}  // namespace qf
