// How new tokens are distributed over threads.
//
// A unit is one head of one token of k or of v. Neighbouring threads, a power of two of them, share it: each has eight
// channels, half the width of the Hadamard matrix. Heads are the fastest index of a unit, then k and v, then tokens, so
// that the threads of a warp read neighbouring memory.
#pragma once

#include "quant/layout.cuh"

namespace qf {
namespace kv_write {

constexpr int kThreads = 128;
constexpr int kResidentBlocks = 4;  // per SM at least: what registers allow without spills
constexpr int kMaxHeadDim = 256;

constexpr int kChannels = 8;  // per thread

struct Deal {
  int log_lanes;       // threads of a unit
  uint32_t units;      // below 2^31
  Divider heads;       // of k and v
  Divider length;      // new tokens of a sequence, if they are not packed
  Divider page_size;   // tokens
  bool table_vectors;  // rope's tables may be read eight at a time
};

}  // namespace kv_write
}  // namespace qf
