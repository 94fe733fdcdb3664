// int8_matmul and linear layers of integers on the CPU: b is packed once per call into panels, then blocks of rows are
// multiplied by blocks of columns. Where there is one block of rows, each task packs its columns as it goes.
//
// The products are those of int8 attention (int8_tiles_*.h): AMX tiles, VNNI, pairs of int16 on AVX2, and floats, exact
// up to 2^24, elsewhere. k is cut into chunks short enough that all of them are exact; chunks are added in int32.
#pragma once

#include <stdint.h>

#include "qflash_ops.h"

namespace qf {

// What each instruction set defines.
struct Int8MatmulKernel {
  int32_t rows, columns;  // of one task: a block of out

  // Bytes of a packed block: `columns` columns of b, and with SwiGLU as many of up, over all of k.
  int64_t (*block_bytes)(const QfLinearParams& p);
  // Bytes of scratch that a task needs.
  int64_t (*scratch_bytes)(const QfLinearParams& p);
  // Packs the block of columns [first, first + columns), as many of them as exist.
  void (*pack)(const QfLinearParams& p, int64_t first, char* block);
  // out[row .. +rows, column .. +columns], as much of it as exists. block NULL: the task packs what it reads.
  void (*multiply)(const QfLinearParams& p, int64_t row, int64_t column, const char* block, char* scratch);
};

namespace generic {
extern const Int8MatmulKernel int8_matmul_kernel;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Int8MatmulKernel int8_matmul_kernel;
}
namespace avx512 {
extern const Int8MatmulKernel int8_matmul_kernel;
}
namespace amx {
extern const Int8MatmulKernel int8_matmul_kernel;
}
#endif

}  // namespace qf
