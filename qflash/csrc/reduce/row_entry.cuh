// The host side of kernels over rows: checks before a launch, and the launch.
#pragma once

#include "common/launch.cuh"
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

// Launches on all rows, in as many launches as the blocks need, with teams of Shape (reduce/row_shape.cuh).
template <class Shape, class Params>
inline int launch_rows(void (*kernel)(Params, RowGrid), const Params& p, int threads, int shared_bytes, void* stream) {
  constexpr int kRowsPerBlock = Shape::Team::kRowsPerBlock;
  RowGrid grid = {0, (p.rows + kRowsPerBlock - 1) / kRowsPerBlock};
  for (int64_t done = 0; done < grid.blocks; done += kMostBlocks) {
    const int64_t left = grid.blocks - done;
    grid.first = done * kRowsPerBlock;
    const Launch how = {left < kMostBlocks ? left : kMostBlocks, threads, shared_bytes,
                        static_cast<cudaStream_t>(stream)};
    if (const int status = launch(how, kernel, p, grid)) return status;
  }
  return QF_OK;
}

}  // namespace qf
