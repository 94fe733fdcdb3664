// int8_gemm_tiled: out = x w on CUDA cores, four products per instruction (dp4a), exact int32 accumulation.
//
//                    128 columns                        256 threads, 8 warps as 4 x 2 over the tile.
//                 +------------+------------+           Thread (y, x), both 0..15, has 8 x 8 accumulators:
//                 | 4x ..+3    | 64+4x ..+3 |           rows    4y ..+3 and 64 + 4y ..+3,
//        4y ..+3  |   4 x 4    |   4 x 4    |           columns 4x ..+3 and 64 + 4x ..+3.
//   128  ---------+------------+------------+           Per word of four k: 4 shared loads of 16 bytes,
//   rows 64+4y    |   4 x 4    |   4 x 4    |           64 dp4a.
//                 +------------+------------+           SwiGLU: the left half of the columns are w's, the right up's.
//
// Shared memory, 32 KB, two buffers of
//   s_x [16][128] words   word (g, row): x[row][4g ..+3]
//   s_w [16][128] words   word (g, column): w[4g ..+3][column]
// permuted to avoid bank conflicts (`place` of gemm/tiled/load.cuh).
//
// w may be contiguous along k (fetched like x) or along n: then a thread fetches 4 k x 16 n and transposes it in
//   registers (gemm/bytes.cuh) into 16 contiguous words.
//
// Pipeline: gemm/tiled/tile.cuh, which `gemm_tiled` runs on floats.
// Bound: dp4a issues at 64 lanes per cycle and SM, 512 operations. See docs/kernels/int8_gemm_tiled.md.
#pragma once

#include "gemm/tiled/tile.cuh"
#include "kernels/linear/int8_gemm_tiled/config.h"

template <class LoadX, class LoadW>
__global__ void __launch_bounds__(qf::gemm::kTiledThreads, qf::int8_gemm_tiled::Config::kMinBlocks)
    qf_int8_gemm_tiled_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  extern __shared__ float4 s_memory[];
  qf::gemm::multiply_tile<qf::int8_gemm_tiled::Config, LoadX, LoadW>(p, grid, reinterpret_cast<uint32_t*>(s_memory));
}
