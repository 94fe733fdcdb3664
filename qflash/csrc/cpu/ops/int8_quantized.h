// What int8_quantized.cc (compiled once) asks of int8_quantized_isa.cc (compiled per ISA).
#pragma once

#include <stdint.h>

#include "isa.h"

QF_DECLARE_PER_ISA(
    // to[0, n) <- from[0, n), which is of type `dtype`, and back.
    void widen_row(float* to, const void* from, int32_t dtype, int n);
    void narrow_row(void* to, const float* from, int32_t dtype, int n))
