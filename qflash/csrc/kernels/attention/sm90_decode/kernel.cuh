// sm90_decode: few query rows against many keys, at memory bandwidth. float16 and bfloat16 in, float32 accumulators.
//
// One block per SM takes an equal run of the tiles of all sequences (attn/decode/share.cuh), in three roles:
//
//    loader   one warp              K and V tiles by TMA, as far ahead as the ring has room; for pages, one lane per
//                                   page of a tile
//    units    three warps           describe the next unit, load its q, and prepare the place of its partial results
//    teams    four of two warps     tiles in turn: each warp S = Q Kt, softmax, O += P V for all rows and 32 keys of a
//                                   tile, with its own m, l, O; warps synchronize only at the end of a unit (head_dim
//                                   128, up to 16 rows)
//
// Rows are the Tq * group queries of a KV head; q stays in registers, above head_dim 128 in shared memory. If a unit is
// split over blocks, they write (m, l, O) to global memory, and the block that ends the unit reduces all of them in key
// order when its share is done.
//
// Shared memory (head_dim 128): a ring of 4 stages of K and V, 32 KB each; 36 KB for the reduction over warps.
// Bound: memory. See docs/kernels/decode.md.
#pragma once

#include "attn/decode/attend.cuh"
#include "attn/decode/counters.cuh"
#include "attn/decode/int8_sums.cuh"
#include "attn/decode/kept_sums.cuh"
#include "attn/decode/tma_pages.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

namespace qf {
namespace sm90_decode {

// kKind: QfKvKind.
template <class Element, int kHeadDim, int kRowWarps, int kKind>
using BaseOf =
    std::conditional_t<kKind == QF_KV_PAGES_INT8, decode::Int8Config<Element, kHeadDim, kRowWarps, 90>,
                       std::conditional_t<kKind == QF_KV_KEPT, decode::KeptConfig<Element, kHeadDim, kRowWarps, 90>,
                                          decode::Config<Element, kHeadDim, kRowWarps, 90, kKind == QF_KV_PAGES>>>;

template <class Element, int kHeadDim, int kRowWarps, int kKind, bool kBatchInvariant_>
struct Config : BaseOf<Element, kHeadDim, kRowWarps, kKind> {
  using Base = BaseOf<Element, kHeadDim, kRowWarps, kKind>;
  static constexpr bool kBatchInvariant = kBatchInvariant_;
  // Whether the thread index is reread at each use, and rows are finished after the outputs have left registers
  // (attend.cuh).
  static constexpr bool kFewRegisters = kHeadDim > 128 && (Base::kKept || (kBatchInvariant && !Base::kInt8)),
                        kFinishesLater = kHeadDim > 128 && Base::kKept &&kBatchInvariant;
  static constexpr int kLoaderThreads = 128, kThreads = kLoaderThreads + Base::kConsumers;  // whole warpgroups
  // Registers are traded if one warpgroup loads and two attend; with one each, both have 255 registers.
  static constexpr bool kTrades = Base::kConsumers > 128;
  static constexpr int kLoaderRegisters = Base::kKept ? 128 : Base::kInt8 ? 104 : 88;
  static constexpr int kConsumerRegisters = Base::kKept ? 184 : Base::kInt8 ? 200 : 208;
  static constexpr int kBarrierBytes = Base::kInt8Queries ? 768 : 512;  // including the units
  static constexpr int kOtherBytes =
      kSwizzleBytes + decode::kUnitStages * Base::kQueryBytes + decode::Area<Base>::kBytes + kBarrierBytes;
  static constexpr int kStageTiles = Base::KeyTile::kBytes + Base::Tile::kBytes;
  static constexpr int kStageBytes = kStageTiles + 2 * Base::kScaleBytes;
  static constexpr int kStages = (227 * 1024 - kOtherBytes) / kStageBytes / Base::kTeams * Base::kTeams;
  static constexpr int kTileBytes = kStages * kStageTiles;
  static constexpr int kSharedBytes = kOtherBytes + kStages * kStageBytes;
  static_assert(kStages >= 2, "");
};

}  // namespace sm90_decode
}  // namespace qf

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    qf_sm90_decode_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::decode::TensorMaps maps,
                          const __grid_constant__ qf::decode::Runs runs, qf::decode::Partials partials,
                          const qf::decode::Flags flags, const qf::decode::Aligned aligned, const int box_rows) {
  using namespace qf;
  using namespace qf::decode;
  extern __shared__ float4 s_memory[];
  char* const s_tiles =
      reinterpret_cast<char*>(s_memory) + (kSwizzleBytes - shared_address(s_memory) % kSwizzleBytes) % kSwizzleBytes;
  char* const s_scales = s_tiles + Config::kTileBytes;
  char* const s_queries = s_scales + Config::kStages * 2 * Config::kScaleBytes;
  char* const s_area = s_queries + kUnitStages * Config::kQueryBytes;
  using Barriers = typename TmaRing<Config>::Barriers;
  auto* const s_barriers = reinterpret_cast<Barriers*>(s_area + Area<Config>::kBytes);
  auto* const s_units = reinterpret_cast<Unit<Config>*>(s_barriers + 1);
  static_assert(sizeof(Barriers) + kUnitStages * sizeof(*s_units) <= Config::kBarrierBytes, "");
  const TmaRing<Config> ring = {s_tiles, reinterpret_cast<float*>(s_scales), s_queries, s_units, s_barriers};
  if (threadIdx.x == Config::kConsumers) {
    ring.init();
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  partials.flags = flags.all();
  __syncthreads();           // the barriers are in place
  wait_for_previous_grid();  // it may have written q, K, V or their lengths
  if (threadIdx.x >= Config::kConsumers) {
    if constexpr (Config::kTrades) give_registers<Config::kLoaderRegisters>();
    const Share<Config> share(p, runs);  // for all four warps, so that they fetch its code once
    const int warp = (threadIdx.x - Config::kConsumers) / 32;
    name_role(warp == 0 ? "loader" : warp == 1 ? "units" : warp == 2 ? "queries" : "parts");
    if (warp == 0) {
      if constexpr (Config::kPaged)
        load_paged_share<Config>(p, maps, share, ring, box_rows);
      else
        load_share<Config>(p, maps, share, ring);
    }
    if (warp == 1) describe_units<Config>(p, share, ring);
    if (warp == 2) load_queries<Config>(p, aligned, share, ring);
    if (warp == 3) clear_parts<Config>(p, share, partials, ring);
  } else {
    if constexpr (Config::kTrades) take_registers<Config::kConsumerRegisters>();
    name_role("consumer", int(threadIdx.x / 32));
    TmaTiles<Config> tiles(ring);
    attend_share<Config>(p, aligned.out, tiles, Area<Config>(s_area), partials);
  }
}
