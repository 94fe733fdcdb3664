// int8_gemm_tc: out = x w on tensor cores, exact int32 accumulation.
//
// One block of 8 warps computes a tile, 128 x 256 (Wide, data centre parts) or 128 x 128 (Square), in steps of 128
// bytes of k:
//
//                      kBlockN = 256                      A warp has 64 x 64 (Wide) or 32 x 64 (Square) accumulators:
//             +--------+--------+--------+--------+       128 or 64 registers per lane. Per 32 bytes of k it reads
//   kBlockM   | warp 0 | warp 2 | warp 4 | warp 6 |       4 (2) fragments of x and 8 of w by ldmatrix, 4 (2) + 4
//   = 128     +--------+--------+--------+--------+       instructions, and issues 32 (16) mma m16n8k32. Turing has
//             | warp 1 | warp 3 | warp 5 | warp 7 |       m8n8k16 only: four of them do the same on the same registers.
//             +--------+--------+--------+--------+       SwiGLU: half of a warp's columns are w's, half are up's.
//
// Shared memory: kStages x (kBlockM + kBlockN) rows of 128 bytes, swizzled (gemm/swizzle.cuh).
//   Wide: 48 KB a stage, 4 stages on sm_90 (192 KB), 3 on sm_80. Square: 32 KB, 4, 3 (sm_86, sm_89) or 2 (sm_75).
//   In the epilogue 4.5 KB of it per warp transpose accumulators for the stores.
//
// Pipeline: gemm/mma/tile.cuh, which `gemm_mma` runs on 16-bit operands.
// Bound: tensor cores; shared memory reads come close behind. Prediction and measurement: docs/kernels/int8_gemm_tc.md.
#pragma once

#include "gemm/mma/tile.cuh"
#include "kernels/linear/int8_gemm_tc/config.h"

template <class Shape, class LoadX, class LoadW>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    qf_int8_gemm_tc_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  extern __shared__ float4 s_memory[];
  qf::gemm::multiply_tile<qf::int8_gemm_tc::Config, Shape, LoadX, LoadW>(p, grid, reinterpret_cast<char*>(s_memory));
}
