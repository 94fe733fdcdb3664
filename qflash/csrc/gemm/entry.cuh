// The host side of the GEMM libraries: what they refuse, and the launch of one block per tile.
#pragma once

#include "common/launch.cuh"
#include "gemm/schedule.cuh"

namespace qf {
namespace gemm {

// -128 * -128 * k must fit an int32.
constexpr int64_t kMostK = 131071;
// Rows and columns, rounded up to whole tiles, must fit 32 bits.
constexpr int64_t kMostRows = 0x7fffffff - 4096;

inline int check_params(const QfLinearParams* p, int out_dtype) {
  if (p->struct_bytes != int32_t(sizeof(QfLinearParams))) return QF_BAD_ABI;
  if (p->dtype != QF_I8 || p->out_dtype != out_dtype || p->activation != QF_ACTIVATION) return QF_UNSUPPORTED;
  if (p->m < 0 || p->n < 0 || p->k < 0 || p->m > kMostRows || p->n > kMostRows || p->k > kMostK) return QF_UNSUPPORTED;
  if (p->w_stride_k != 1 && p->w_stride_n != 1) return QF_UNSUPPORTED;
  return QF_OK;
}

inline const char* status_text(const char* kernel, int status) {
  static thread_local char text[256];
  if (status != QF_UNSUPPORTED) return qf::status_text(kernel, status);
  snprintf(text, sizeof text,
           "kernel '%s' was built for another out_dtype or activation, or k is past 131071 (int32 could overflow), m "
           "or n past 2^31 - "
           "4096, or b contiguous along neither k nor n",
           kernel);
  return text;
}

template <class Kernel>
inline int launch(Kernel* kernel, const QfLinearParams& p, int tile_rows, int tile_columns, int threads,
                  int shared_bytes, void* stream) {
  if (p.m == 0 || p.n == 0) return QF_OK;
  const Grid grid = grid_of(p, tile_rows, tile_columns);
  const int64_t blocks = int64_t(grid.row_tiles) * grid.column_tiles;
  if (blocks > kMostBlocks) return QF_UNSUPPORTED;
  return qf::launch({blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)}, kernel, p, grid);
}

}  // namespace gemm
}  // namespace qf
