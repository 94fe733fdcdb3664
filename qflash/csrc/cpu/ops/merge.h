// The interface between the entry of merge (merge.cc, compiled once) and the kernel (compiled per ISA): rows
// [begin, end) of [batch, length, heads] on the calling thread.
#pragma once

#include "isa.h"
#include "qflash_ops.h"

QF_DECLARE_PER_ISA(int merge_rows(const QfMergeParams& p, int64_t begin, int64_t end))
