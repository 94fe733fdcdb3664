// The host side of kernels over rows: checks before a launch, and the launch.
#pragma once

#include "attn/entry.cuh"
#include "qflash_ops.h"
#include "reduce/row_team.cuh"

namespace qf {

// Params: QfRowsParams or QfCrossEntropyParams.
template <class Params>
inline int check_rows(const Params* p, int dtype) {
  if (p->struct_bytes != int32_t(sizeof(Params))) return QF_BAD_ABI;
  if (p->dtype != dtype || p->columns > kMaxLength) return QF_UNSUPPORTED;
  return QF_OK;
}

// As many launches as the blocks take. `rows_per_block`: how far a block takes grid.first on.
template <class Params>
inline int launch_rows(void (*kernel)(Params, RowGrid), const Params& p, RowGrid grid, int rows_per_block, int threads,
                       int shared_bytes, void* stream) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  for (int64_t done = 0; done < grid.items; done += kMostBlocks) {
    const int64_t left = grid.items - done;
    grid.first = done * rows_per_block;
    kernel<<<unsigned(left < kMostBlocks ? left : kMostBlocks), threads, shared_bytes,
             static_cast<cudaStream_t>(stream)>>>(p, grid);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  return QF_OK;
}

}  // namespace qf
