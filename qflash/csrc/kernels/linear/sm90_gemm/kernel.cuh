// sm90_gemm: linear layers for Hopper. out = activation(x w + bias) + residual, of float16, bfloat16 or int8, with
// float32 or int32 accumulators. TMA, the copy engine, fills shared memory, wgmma reads it, and no warp issues both.
//
// Persistent: one block per SM; pairs of blocks, one above the other, are clusters that share columns of w
// (gemm/wgmma/walk.cuh). The large tile, of one block:
//
//                          256 columns (SwiGLU: 128 of gate, then the same 128 of up)
//                     +---------------------------------------------+
//            64 rows  | consumer 0: wgmma m64n256, 128 accumulators |    a step along k is 128 bytes: 64 16-bit
//                     | per thread, x and w from shared memory      |    elements or 128 of int8, four MMAs
//                     +---------------------------------------------+
//            64 rows  | consumer 1                                  |    the small tile: 64 x 128, one consumer
//                     +---------------------------------------------+
//
// Roles (large tile):
//   warpgroup 0   thread 0     produce: x of this block, and half of w for both blocks of the cluster, by TMA
//   (40 regs)     warp 1       stage_terms: bias and scales of the tile's columns and rows
//   warpgroups    consume: main loop, then epilogue: scales, bias, activation, residual, rounding, in panels of 16 rows
//   1, 2 (232)    x 128 bytes through shared memory, stored by TMA
//
// Shared memory (large tile, integers; 232 016 bytes of 232 448):
//   x        4 stages of [128][128 bytes]       64 KB   swizzled by TMA (hopper/descriptor.cuh)
//   w        4 stages of [256][128 bytes]      128 KB   (or panels of 64 columns, where w is contiguous along n)
//   panels   8 warps x 2 of [16][128 bytes]     32 KB
//   terms    bias and scales                   2.5 KB
//   rings    a full and an empty mbarrier for every stage and for the terms (gemm/wgmma/shared_memory.cuh)
//
// Pipeline (gemm/wgmma/consumer.cuh): a step's MMAs run while those of the next are started; its stage is released when
// they are complete, in both blocks. Consumer 1 starts kLag steps late, so that the epilogue of one consumer overlaps
// the main loop of the other.
//
// Few rows, or a last wave of few tiles: k is cut into splits, whose partial results are reduced through memory
// (gemm/wgmma/splits.cuh). Matrices that TMA cannot address: a pass before or after (gemm/wgmma/relayout.cuh). Bound:
// the tensor cores, and next to them shared memory at 128 bytes per cycle. docs/kernels/sm90_gemm.md has the budget and
// the prediction, docs/log/sm90_gemm.md the measurements.
//
// Gradients are products of the same kernel: sm90_linear_bwd has x contiguous along m, and two weights in sequence
// along k.
#pragma once

#include "gemm/wgmma/block.cuh"
#include "gemm/wgmma/relayout.cuh"
#include "kernels/linear/sm90_gemm/config.h"

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    qf_sm90_gemm_kernel(const __grid_constant__ QfLinearParams p,
                        const __grid_constant__ qf::gemm::wgmma::TensorMaps maps,
                        const __grid_constant__ qf::gemm::wgmma::Walk walk,
                        const __grid_constant__ qf::gemm::wgmma::PartialSums partials) {
  alignas(1024) extern __shared__ float4 s_memory[];  // to kSwizzleBytes: there is no room to align it by hand
  qf::gemm::wgmma::run_block<Config>(p, maps, walk, partials, qf::own_shared(s_memory));
}

// The passes before and after, for matrices that TMA cannot address.
template <class Element, bool kBack>
__global__ void __launch_bounds__(qf::gemm::wgmma::kRelayoutThreads)
    qf_sm90_gemm_relayout_kernel(const __grid_constant__ qf::gemm::wgmma::Rows given, char* const g_copy) {
  qf::gemm::wgmma::relayout_rows<Element, kBack>(given, g_copy);
}
