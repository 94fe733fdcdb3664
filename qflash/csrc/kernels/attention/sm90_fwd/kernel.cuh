// sm90_fwd: attention for Hopper, float16 and bfloat16 in, float32 sums. The copy engine fills shared memory, warpgroup
// products empty it, and nobody who multiplies ever loads.
//
// One block per multiprocessor stays for the whole problem and works through a list of items, a tile of kBlockM rows of
// one head each (items.cuh). Roles (head_dim 128):
//
//   warpgroup 0   thread 0     produce: q, K and V tiles by TMA, as far ahead as there are empty stages
//   (40 regs)     thread 32    plan: what the next items are, which keys they see
//                 warps 2, 3   inspect: NaN and infinity in V, in tiles that some rows see only in part
//   warpgroup 1   consume: rows 0 - 63 of the tile; S = Q Kt, 64 x 128 in 64 registers, Q and K from shared memory;
//   (232 regs)    O += P V, 64 x 128 in 64 registers, P from 32
//   warpgroup 2   consume: rows 64 - 127; head_dim 64 has a third consumer, with 160 registers each
//
// Shared memory (head_dim 128): panels of 64 channels, 128 bytes a row, swizzled by TMA (hopper/descriptor.cuh).
//   q        2 stages of [kBlockM][kHeadDim]   64 KB   the next item's q is there before this one's is done with
//   k, v     2 stages of [kBlockN][kHeadDim]  128 KB
//   rings    a full and an empty mbarrier for every stage of q, K, V and records; two more kinds, see shared.cuh
//   records  what everybody must know of this item and the next
//
// Pipeline of a consumer, for tile n of an item:
//   start S(n + 1) = Q K(n + 1)t          tensor cores, asynchronous
//   start O += P(n) V(n)                  behind it
//   wait for S(n + 1); weights            under O's product, and under the products of the other consumer
//   wait for O; round the weights into P(n + 1)
// Weights are relative to the maxima of a row's first tile. Should later scores outgrow those by much the sums of
// weights tell, and the scores are computed again. At the end of an item S of the next one is started before the
// outputs are divided and stored.
//
// Masks, NaN in V: as fa_mma's. Rope, and strides that TMA cannot walk: a pass before (stage.cuh).
// Bound: the tensor cores at 2048 cycles a pair of tiles, if the consumers' own instructions (about 390 a warp and
// tile) hide under them. See docs/kernels/sm90_fwd.md for what was predicted, tried and measured.
#pragma once

#include "kernels/attention/sm90_fwd/config.h"
// What follows is made for those tiles.
#include "attn/wgmma/block.cuh"
#include "attn/wgmma/inspect.cuh"
#include "kernels/attention/sm90_fwd/math.cuh"

template <bool kPlain>
__global__ void __launch_bounds__(qf::sm90::kThreads, 1)
    qf_sm90_fwd_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::sm90::Maps maps,
                       const __grid_constant__ qf::sm90::Items items, const bool out_aligned) {
  using namespace qf::sm90;
  extern __shared__ float4 s_memory[];
  work<Math<kPlain>>(p, p, maps, items, SixteenBits(), out_aligned, s_memory);
}
