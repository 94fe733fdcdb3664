// The interface between the entry of rope (rope.cc, compiled once) and the kernel (compiled per ISA).
#pragma once

#include "isa.h"
#include "qflash_ops.h"

namespace qf {

// Positions of tokens: values[b * stride_b + t], or t where there are no values. `name`: in messages.
struct TokenPositions {
  const int32_t* values;
  int64_t stride_b;
  const char* name;
};

static inline int64_t position_of(const TokenPositions& positions, int64_t b, int64_t t) {
  return positions.values ? positions.values[b * positions.stride_b + t] : t;
}

}  // namespace qf

QF_DECLARE_PER_ISA(
    // Rows [begin, end) of [batch, length, heads] on the calling thread. Positions were checked.
    int rope_rows(const QfRopeParams& p, const TokenPositions& positions, int64_t begin, int64_t end))
