// sm90_int8: attention for Hopper with INT8 scores. S = Q Kt of integers, exact; P V in 16 bits or
// (QF_INT8_FP8) E4M3.
//
// Blocks, items, roles and the pipeline are sm90_fwd's (attn/sm90): one warpgroup brings tiles, two own 64 rows each. A
// pass before (attn/sm90_quantize) leaves q and K as int8 with scales, and V, for E4M3, transposed. What is its own:
//
//              kBlockN = 128 keys (head_dim 256: 64)
//             +--------------------+
//   warpgroup | S = Q Kt  64 x 128 |  int32 sums in 64 registers; + the bits of 1.5 * 2^23 they are floats
//       1     |                    |  base-2 scores = slope * S: scale of the row * scale of 64 keys, no two rows alike
//   warpgroup |           64 x 128 |
//       2     +--------------------+
//   O += P V   P from registers: 32 of 16-bit pairs, or 16 of four E4M3 each
//
// Weights are relative to a power of two, the reference of their row, found in the row's first tile. Where weights grow
// too large for P the tile's scores are computed once more, and outputs and sums follow the new reference.
// E4M3: rows are divided by the sums of weights as they were rounded, and get back the mean that V lost. The tensor
// cores' sums of such products keep about 12 bits, so every 1024 keys they are added to others, in shared memory, in
// float32.
//
// Shared memory (head_dim 128):          int8      int8_fp8
//   q       2 stages [128][128] int8     32 KB       32 KB
//   k       [128][128] int8          2 * 16 KB    4 * 16 KB
//   v       [128][128], 16-bit       2 * 32 KB              or E4M3, [channel][key]: 4 * 16 KB
//   aside   outputs on their way         32 KB       64 KB  and their sums; 1 KB of ones
//
// Bound: the tensor cores, at 1536 (int8) or 1024 (int8_fp8) cycles a pair of tiles, where sm90_fwd has 2048; then the
// exponentials, 1024 cycles whatever the precision; but first what a warp executes in sequence, about 390 and 360
// instructions a tile. See docs/kernels/sm90_int8.md for what was predicted, tried and measured.
#pragma once

#include "kernels/attention/sm90_int8/config.h"
// What follows is made for those tiles.
#include "attn/wgmma/block.cuh"
#include "attn/wgmma/inspect.cuh"
#include "kernels/attention/sm90_int8/inspect.cuh"
#include "kernels/attention/sm90_int8/math.cuh"

template <bool kPlain>
__global__ void __launch_bounds__(qf::sm90::kThreads, 1)
    qf_sm90_int8_kernel(const __grid_constant__ qf::sm90::Quantized a, const __grid_constant__ qf::sm90::Maps maps,
                        const __grid_constant__ qf::sm90::Items items, const bool out_aligned) {
  using namespace qf::sm90;
  extern __shared__ float4 s_memory[];
  if constexpr (kFp8)
    work<Math<kPlain>>(a.attn, a, maps, items, EightBits{a}, out_aligned, s_memory);
  else
    work<Math<kPlain>>(a.attn, a, maps, items, SixteenBits(), out_aligned, s_memory);
}
