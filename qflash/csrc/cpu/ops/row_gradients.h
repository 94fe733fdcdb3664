// The interface between the entries of the gradients of softmax, layer_norm and cross_entropy (row_gradients.cc,
// compiled once) and the row kernels (compiled per ISA): rows [begin, end) on the calling thread. QF_OK or
// QF_NO_MEMORY.
#pragma once

#include "isa.h"
#include "qflash_ops.h"

QF_DECLARE_PER_ISA(int softmax_bwd_rows(const QfSoftmaxBwdParams& p, int64_t begin, int64_t end);
                   // `sums`: where the rows' share of dweight and of dbias goes, [2][columns]; NULL: neither is
                   // requested.
                   int layer_norm_bwd_rows(const QfLayerNormBwdParams& p, int64_t begin, int64_t end, float* sums);
                   // Columns [begin, end) of dweight and dbias, from `count` such shares in their order.
                   void layer_norm_bwd_columns(const QfLayerNormBwdParams& p, const float* sums, int64_t count,
                                               int64_t begin, int64_t end);
                   // `share`: what the gradient of the total adds to that of each loss.
                   int cross_entropy_bwd_rows(const QfCrossEntropyBwdParams& p, int64_t begin, int64_t end,
                                              float share))
