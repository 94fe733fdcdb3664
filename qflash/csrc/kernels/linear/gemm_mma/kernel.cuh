// gemm_mma: out = activation(x w + bias) + residual of 16-bit operands on tensor cores, float32 accumulators.
//
// One block of 8 warps computes a tile, 128 x 256 (Wide, data centre parts) or 128 x 128 (Square), in steps of 128
// bytes of k, 64 elements:
//
//                      kBlockN = 256                      A warp has 64 x 64 (Wide) or 32 x 64 (Square) accumulators:
//             +--------+--------+--------+--------+       128 or 64 registers per lane. Per 16 elements of k it reads
//   kBlockM   | warp 0 | warp 2 | warp 4 | warp 6 |       4 (2) fragments of x and 8 of w by ldmatrix, 4 (2) + 4
//   = 128     +--------+--------+--------+--------+       instructions, and issues 32 (16) mma m16n8k16. Turing has
//             | warp 1 | warp 3 | warp 5 | warp 7 |       m16n8k8: two of them do the same on the same registers.
//             +--------+--------+--------+--------+
//
// SwiGLU: of a warp's 64 columns the first 32 are w's and the others the same 32 of up, so that one lane holds both
//   accumulators of an element, and out has half of the tile's columns.
//
// Shared memory: kStages x (kBlockM + kBlockN) rows of 128 bytes, swizzled (gemm/swizzle.cuh).
//   Wide: 48 KB a stage, 4 stages on sm_90 (192 KB), 3 on sm_80. Square: 32 KB, 4, 3 (sm_86, sm_89) or 2 (sm_75).
//   Where k is contiguous, a row is 64 k of one row of x or column of w. Where m or n is, it is 64 of them at one k:
//   tiles keep their memory layout, and ldmatrix.trans transposes them into registers.
//   In the epilogue 4.5 KB of it per warp transpose accumulators for the stores.
//
// Pipeline: gemm/mma/tile.cuh, which `int8_gemm_tc` runs on bytes.
// Bound: tensor cores; shared memory reads come close behind. Prediction: docs/kernels/gemm_mma.md.
#pragma once

#include "gemm/mma/tile.cuh"
#include "kernels/linear/gemm_mma/config.h"

template <class Config, class Shape, class LoadX, class LoadW>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    qf_gemm_mma_kernel(const __grid_constant__ QfLinearParams p, const __grid_constant__ qf::gemm::Grid grid) {
  extern __shared__ float4 s_memory[];
  qf::gemm::multiply_tile<Config, Shape, LoadX, LoadW>(p, grid, reinterpret_cast<char*>(s_memory));
}
