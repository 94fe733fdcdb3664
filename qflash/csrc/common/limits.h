// Limits of 32-bit counts.
#pragma once

#include <stdint.h>

namespace qf {

// Row and key indices, rounded up to a multiple of the tile, must fit in 32 bits.
constexpr int32_t kMaxLength = 0x7fffffff - 4096;
// Maximum number of blocks of one launch.
constexpr int64_t kMostBlocks = 0x7fffffff;

}  // namespace qf
