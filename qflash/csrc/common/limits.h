// What 32 bits count.
#pragma once

#include <stdint.h>

namespace qf {

// Row and key indices, rounded up to whole tiles, must fit 32 bits.
constexpr int32_t kMaxLength = 0x7fffffff - 4096;
// Blocks of one launch.
constexpr int64_t kMostBlocks = 0x7fffffff;

}  // namespace qf
