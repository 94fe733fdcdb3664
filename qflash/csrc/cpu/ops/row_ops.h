// The interface between the entries of softmax, layer_norm and cross_entropy (row_ops.cc, compiled once) and the row
// kernels (compiled per ISA): rows [begin, end) on the calling thread. QF_OK or QF_NO_MEMORY.
#pragma once

#include "isa.h"
#include "qflash_ops.h"

QF_DECLARE_PER_ISA(int softmax_rows(const QfRowsParams& p, int64_t begin, int64_t end);
                   int layer_norm_rows(const QfRowsParams& p, int64_t begin, int64_t end);
                   int cross_entropy_rows(const QfCrossEntropyParams& p, int64_t begin, int64_t end))
