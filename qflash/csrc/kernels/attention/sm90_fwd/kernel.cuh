// sm90_fwd: attention for Hopper, float16 and bfloat16 in, float32 accumulators. TMA fills shared memory, wgmma
// consumes it, and consumer warps issue no loads.
//
// The kernel is persistent, with one block per SM, which processes work tiles of kBlockM rows of one head each
// (attn/wgmma/work_tile.cuh). Roles (head_dim 128):
//
//   warpgroup 0   thread 0     produce: q, K and V tiles by TMA, as far ahead as there are empty stages
//   (40 regs)     thread 32    describe_work: what the next work tiles are, which keys they see
//                 warps 2, 3   inspect: NaN and infinity in V, in tiles that some rows see only in part
//   warpgroup 1   consume: rows 0 - 63 of the tile; S = Q Kt, 64 x 128 in 64 registers, Q and K from shared memory;
//   (232 regs)    O += P V, 64 x 128 in 64 registers, P in 32 more
//   warpgroup 2   consume: rows 64 - 127; head_dim 64 has a third consumer, with 160 registers each
//
// Shared memory (head_dim 128): panels of 64 channels, 128 bytes a row, swizzled by TMA (hopper/descriptor.cuh).
//   q        2 stages of [kBlockM][kHeadDim]   64 KB   the next work tile's q is loaded before this one is done
//   k, v     2 stages of [kBlockN][kHeadDim]  128 KB
//   rings    a full and an empty mbarrier for every stage of q, K, V and work tiles; two more kinds of barrier: all of
//            them, with who arrives and who waits, in attn/wgmma/shared_memory.cuh
//
// Pipeline of a consumer (attn/wgmma/consumer.cuh), for tile n of a work tile:
//   start S(n + 1) = Q K(n + 1)t          tensor cores, asynchronous
//   start O += P(n) V(n)                  behind it
//   wait for S(n + 1); weights            overlap O's MMA and the MMAs of the other consumer
//   wait for O; release V(n) and K(n + 1); round the weights into P(n + 1)
// Weights are relative to the maxima of a row's first tile. If later scores exceed those by much, the sums of the
// weights show it, and the scores are recomputed (rare_recover.cuh). At the end of a work tile, S of the next one is
// started before the epilogue divides and stores the outputs.
//
// Masks, NaN in V: as in fa_mma. Rope, and strides that TMA cannot address: a pass before (relayout.cuh).
// Bound: the tensor cores, at 2048 cycles per tile of K and V, if the consumers' own instructions (about 354 per warp
// and tile) hide behind them. docs/kernels/sm90_fwd.md has what was predicted, tried and measured.
#pragma once

#include "attn/page_gather.cuh"
#include "attn/wgmma/block.cuh"
#include "attn/wgmma/rare_recover.cuh"
#include "attn/wgmma/relayout.cuh"
#include "attn/wgmma/scores_16bit.cuh"
#include "attn/wgmma/weights_16bit.cuh"
#include "kernels/attention/sm90_fwd/config.h"

namespace qf {
namespace sm90_fwd {

template <class Element, int kHeadDim, bool kPlain, bool kPaged>
struct Kernel {
  using Config = wgmma::TileConfig<Shape<Element, kHeadDim, kPlain, kPaged>>;
  using Params = QfAttnParams;
  using Scores = wgmma::SixteenBitScores<Config, kPlain>;
  using Weights = wgmma::SixteenBitWeights<Config, Config::kKeepsRemainders>;
  using Rare = wgmma::Recover<Config>;
  using Inspector = wgmma::SixteenBitInspector<Config>;
  using Work = wgmma::WorkTile<Config>;

  __device__ static __forceinline__ void describe(const Params&, Work&) {}
  __device__ static __forceinline__ void store(const QfAttnParams& p, const wgmma::SharedMemory<Config>& s,
                                               const Work& work, int q_stage, bool aligned, const Scores&,
                                               const Weights&, const Rare&, const wgmma::RowState& rows,
                                               float (&O)[1][Config::kOTiles][4]) {
    using QTile = typename Config::QTile;
    static_assert(!Config::kOutThroughQ || Config::kQStages > 1, "a single stage of q is released before this");
    // A warp's MMAs read only its own 16 rows of q, so these are free for its outputs.
    char* const s_rows = s.q + q_stage * QTile::kBytes + wgmma::warp_row() * QTile::kRowBytes;
    wgmma::finish<Config::kOutThroughQ ? QTile::kPanelBytes : 0>(p, work, O, rows, s_rows, aligned,
                                                                 wgmma::SixteenBitOutput<Config>{p, work});
    if (Config::kOutThroughQ) fence_proxy_async();  // the staged rows, before TMA loads into that stage again
  }
};

}  // namespace sm90_fwd
}  // namespace qf

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, 1)
    qf_sm90_fwd_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::wgmma::TensorMaps maps,
                       const __grid_constant__ qf::TileSchedule schedule, const bool out_aligned) {
  extern __shared__ float4 s_memory[];
  qf::wgmma::run_block<Kernel>(p, p, maps, schedule, out_aligned, reinterpret_cast<char*>(s_memory));
}

// The relayout pass, for rotated tensors and strides that TMA cannot address.
template <class Element, bool kPaged>
__global__ void __launch_bounds__(qf::wgmma::kRelayoutThreads)
    qf_sm90_fwd_relayout_kernel(const __grid_constant__ QfAttnParams p,
                                const __grid_constant__ qf::wgmma::Relayout relayout, char* const copies,
                                const bool tables_vectorise) {
  qf::wgmma::relayout_tokens<Element, kPaged>(p, relayout, copies, tables_vectorise);
}

// The gather pass, for pages that TMA cannot load in place: INT8 pages, or strides that it cannot address.
template <class Element, bool kInt8>
__global__ void __launch_bounds__(qf::kGatherThreads)
    qf_sm90_fwd_gather_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ QfKv to,
                              int32_t* const g_table, const qf::PageAccess vector) {
  qf::gather_pages<Element, kInt8>(p, to, g_table, vector);
}
