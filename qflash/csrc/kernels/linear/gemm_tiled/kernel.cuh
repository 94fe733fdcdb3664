// gemm_tiled: out = activation(x w + bias) + residual on CUDA cores in float32; converts 16-bit operands when loading.
//
//                    128 columns                        256 threads, 8 warps as 4 x 2 over the tile.
//                 +------------+------------+           Thread (y, x), both 0..15, has 8 x 8 accumulators:
//                 | 4x ..+3    | 64+4x ..+3 |           rows    4y ..+3 and 64 + 4y ..+3,
//        4y ..+3  |   4 x 4    |   4 x 4    |           columns 4x ..+3 and 64 + 4x ..+3.
//   128  ---------+------------+------------+           Per k: 4 shared loads of 16 bytes, 64 multiply-adds.
//   rows 64+4y    |   4 x 4    |   4 x 4    |           SwiGLU: the left half of the columns are w's, the right up's;
//                 +------------+------------+           a thread has both accumulators of an element.
//
// Shared memory, 32 KB, two buffers of
//   s_x [16][128] floats   (k, row): x[row][k]
//   s_w [16][128] floats   (k, column): w[k][column]
// permuted to avoid bank conflicts (`place` of gemm/tiled/load.cuh). Operands contiguous along k are transposed by the
// stores to it, operands contiguous along m or n keep their memory order.
//
// Pipeline: gemm/tiled/tile.cuh, which `int8_gemm_tiled` runs on words of four int8.
// Bound: FFMA issues at 128 lanes per cycle and SM. See docs/kernels/gemm_tiled.md.
#pragma once

#include "gemm/tiled/tile.cuh"
#include "kernels/linear/gemm_tiled/config.h"

template <class Config, class LoadX, class LoadW>
__global__ void __launch_bounds__(qf::gemm::kTiledThreads, Config::kMinBlocks)
    qf_gemm_tiled_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  extern __shared__ float4 s_memory[];
  qf::gemm::multiply_tile<Config, LoadX, LoadW>(p, grid, reinterpret_cast<uint32_t*>(s_memory));
}
