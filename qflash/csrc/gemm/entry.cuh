// The host side of the GEMM libraries: which problems they reject, and the launch of one block per tile.
#pragma once

#include "common/launch.cuh"
#include "gemm/schedule.cuh"

namespace qf {
namespace gemm {

// -128 * -128 * k must fit an int32.
constexpr int64_t kMostK = 131071;
// Bytes of rows and columns, rounded up to whole tiles, must fit 32 bits.
constexpr int64_t kMostBytes = 0x7fffffff - 4096;

// What a library was built for.
struct Built {
  int dtype, activation;
  int out_dtype;  // of integers; for floats the call selects `dtype` or QF_F32
};

inline int check_params(const QfLinearParams* p, const Built& built) {
  if (p->struct_bytes != int32_t(sizeof(QfLinearParams))) return QF_BAD_ABI;
  const bool integers = built.dtype == QF_I8;
  if (p->dtype != built.dtype || p->activation != built.activation) return QF_UNSUPPORTED;
  if (p->out_dtype != built.out_dtype && (integers || p->out_dtype != QF_F32)) return QF_UNSUPPORTED;
  const int64_t most = kMostBytes / bytes_of(built.dtype);
  if (p->m < 0 || p->n < 0 || p->k < 0 || p->m > most || p->n > most || p->k > (integers ? kMostK : most))
    return QF_UNSUPPORTED;
  if (p->x_stride_k != 1 && (integers || p->x_stride_m != 1)) return QF_UNSUPPORTED;
  if (p->w_stride_k != 1 && p->w_stride_n != 1) return QF_UNSUPPORTED;
  if (built.activation == QF_SWIGLU && (w_along_k(*p) ? p->up_stride_k : p->up_stride_n) != 1) return QF_UNSUPPORTED;
  return QF_OK;
}

inline const char* status_text(const char* kernel, int status) {
  static thread_local char text[384];
  if (status != QF_UNSUPPORTED) return qf::status_text(kernel, status);
  snprintf(
      text, sizeof text,
      "kernel '%s' was built for another dtype, out_dtype or activation, or x or w has no contiguous dimension (up "
      "not that of w), or m, n or k is past what 32 bits count in bytes (of integers: k past 131071, where int32 "
      "could overflow)",
      kernel);
  return text;
}

template <class Kernel>
inline int launch(Kernel* kernel, const QfLinearParams& p, const Operands& operands, int tile_rows, int tile_columns,
                  int threads, int shared_bytes, void* stream) {
  if (p.m == 0 || p.n == 0) return QF_OK;
  const Grid grid = grid_of(p, operands, tile_rows, tile_columns);
  const int64_t blocks = int64_t(grid.row_tiles) * grid.column_tiles;
  if (blocks > kMostBlocks) return QF_UNSUPPORTED;
  return qf::launch({blocks, threads, shared_bytes, static_cast<cudaStream_t>(stream)}, kernel, p, grid);
}

}  // namespace gemm
}  // namespace qf
