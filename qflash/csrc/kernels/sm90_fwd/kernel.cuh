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

#include "kernels/sm90_fwd/consumer.cuh"
#include "kernels/sm90_fwd/producer.cuh"
#include "ptx/setmaxnreg.cuh"

template <bool kPlain>
__global__ void __launch_bounds__(qf::sm90_fwd::kThreads, 1)
    qf_sm90_fwd_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::sm90_fwd::Maps maps,
                       const __grid_constant__ qf::sm90_fwd::Items items, const bool out_aligned) {
  using namespace qf;
  using namespace qf::sm90_fwd;
  extern __shared__ float4 s_memory[];
  const Shared s(reinterpret_cast<char*>(s_memory));
  const bool rows_fall = packed_rows_fall(p);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32, kInspectorWarps = kInspectors / 32;
    s.q_ring->init(kConsumerWarps);
    s.k_ring->init(kConsumerWarps);
    s.v_ring->init(kConsumerWarps + kInspectorWarps);
    s.record_ring->init(kConsumerWarps + 1 + kInspectorWarps);
    for (int i = 0; i < kStages; ++i) mbarrier_init(&s.v_checked[i], kInspectorWarps);
    mbarrier_init(s.wanted, 1);
    fence_mbarrier_init();  // the barriers, to the copy engine
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  __syncthreads();  // the barriers are in place
  if (threadIdx.x < kGroupThreads) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, items, maps, s);
    if (threadIdx.x == 32) plan(p, items, s, rows_fall);
    if (threadIdx.x >= kGroupThreads - kInspectors) inspect(s, threadIdx.x - (kGroupThreads - kInspectors));
  } else {
    take_registers<kConsumerRegisters>();
    consume<kPlain>(p, items, s, out_aligned);
  }
}
