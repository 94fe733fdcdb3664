// The interface between kv_write.cc (compiled once) and kv_write_isa.cc (compiled per ISA). Every step is defined bit
// for bit by qflash/reference/kv_write.py; both are compiled without fused multiply-adds.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "qflash_ops.h"

namespace qf {

// New tokens [first, first + count) of sequence `batch`.
struct NewTokens {
  int64_t batch;
  int64_t first_row;  // the sequence's first new token in k and v; 0 unless packed
  int64_t first, count;
  int64_t place;  // position in the sequence of its new token 0
};

}  // namespace qf

QF_DECLARE_PER_ISA(
    // Stores the tokens of all heads. Their places were checked.
    void write_tokens(const QfKvWriteParams& p, const NewTokens& tokens))
