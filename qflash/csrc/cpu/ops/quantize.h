// The interface between quantize.cc (compiled once) and quantize_isa.cc (compiled per ISA). Every step is defined bit
// for bit by docs/kernels/quantize.md; both are compiled without fused multiply-adds.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "qflash_ops.h"
#include "rounding.h"

namespace qf {

constexpr int64_t kMeanChunk = 64;  // tokens summed in float32 before they join a float64 sum

// Tokens first .. first + count - 1 of one head, which exist, as float32 rows.
struct TokenBlock {
  int64_t b, h, first, count;
  float* rows;         // [count][stride]
  int64_t stride;      // head_dim and room for a vector more
  uint8_t* nonfinite;  // [count]: 1 for a nonfinite token
};

// Statistics of the numbers behind one scale.
struct Extent {
  uint32_t largest = 0;              // magnitude among finite tokens
  float above = 0.0f, below = 0.0f;  // largest x and -x among them, at least 0
  bool any_finite = false, any_nonfinite = false;

  void join(const Extent& other);
};

}  // namespace qf

QF_DECLARE_PER_ISA(
    // rows <- x, rotated and, if `mean` is given, less it; nonfinite.
    void load_tokens(const QfQuantizeParams& p, const TokenBlock& block, const float* mean);
    // sums [head_dim] += the block's finite tokens, in sequence; returns their number.
    int32_t sum_tokens(const QfQuantizeParams& p, const TokenBlock& block, float* sums);
    Extent extent_of_tokens(const QfQuantizeParams& p, const TokenBlock& block);
    // values and, if requested, sums.
    void round_tokens(const QfQuantizeParams& p, const TokenBlock& block, const Scale& scale);
    // out <- tokens first .. first + count - 1 of one head.
    int dequantize_tokens(const QfDequantizeParams& p, int64_t b, int64_t h, int64_t first, int64_t count))
