// Scheduling: the threads of a block, or of a cluster's blocks, take turns until all are done or none can go on.
#pragma once

#include <cstdint>
#include <random>

#include "emulate/fiber.h"

namespace emulate {

// What a generation of GPUs adds to a block, from its first use on.
struct Extension {
  virtual bool idle() = 0;  // when every thread waits: performs a pending operation; returns whether there was one
  virtual void end() = 0;
};

inline Extension* extension = nullptr;
inline std::mt19937* order = nullptr;                                  // the source of all random choices
inline int or_sum[kMostClusterBlocks], or_result[kMostClusterBlocks];  // of __syncthreads_or

// Runs `kernel(arguments)` as every thread of `blocks` blocks: `cluster` of them together, clusters in sequence.
// Returns false if something went wrong: `complaint` has the reason.
bool run_blocks(void (*kernel)(const void*), const void* arguments, int64_t blocks, int cluster, int threads,
                int shared_bytes, unsigned seed);

}  // namespace emulate
