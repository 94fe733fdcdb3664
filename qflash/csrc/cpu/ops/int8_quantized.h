// Attention on arrays that are INT8 already, and the interface between int8_quantized.cc (compiled once) and
// int8_quantized_isa.cc (compiled per ISA).
#pragma once

#include <stdint.h>

#include "isa.h"
#include "qflash.h"

namespace qf {

// p.kv.kind is QF_KV_QUANTIZED. May throw std::bad_alloc.
int attend_quantized(const QfAttnParams& p, Isa isa);

}  // namespace qf

QF_DECLARE_PER_ISA(
    // to[0, n) <- from[0, n), which is of type `dtype`, and back.
    void widen_row(float* to, const void* from, int32_t dtype, int n);
    void narrow_row(void* to, const float* from, int32_t dtype, int n))
