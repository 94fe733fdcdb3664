// Loads tiles of K and V from the pages of a cache with TMA, through the ring of tma_tiles.cuh.
#pragma once

#include "attn/decode/tma_tiles.cuh"
#include "attn/pages.cuh"

namespace qf {
namespace decode {

// One warp loads all tiles of the block's share. Each lane copies a box of `box_rows` keys, which divides both a page
// and a tile; it looks its page up before it waits for the stage. What is in no page of the pool reads as zeros, and
// keeps whatever scales were there before: only rows that are NaN see it.
template <class Config>
__device__ __forceinline__ void load_paged_share(const QfAttnParams& p, const TensorMaps& maps, Share<Config> share,
                                                 const TmaRing<Config>& ring, int box_rows) {
  using Tile = typename Config::Tile;
  const int row = int(threadIdx.x % 32) * box_rows;  // in the tile
  const auto scales_at = [&](const QfScales& x, const Place& here, int kv_head) {
    return x.scale + here.page * x.stride_b + kv_head * x.stride_h + here.token;
  };
  const bool loads = row < Config::kBlockN;
  RingWalk<Config::kStages> at;
  for (; !share.is_over(); share.advance(p)) {
    const Part part = share.part();
    const Seen<Config> seen(p, part.b);
    const PageRow pages(p.kv, part.b);
    const int tiles = seen.tiles(part);
    int key0 = seen.first_key(part);
    Place next{};
    if (loads && tiles > 0) next = pages.place(key0 + row, p.k_len);
    for (int n = 0; n < tiles; ++n, key0 += Config::kBlockN, at.advance()) {
      const Place here = next;
      if (loads && n + 1 < tiles) next = pages.place(key0 + Config::kBlockN + row, p.k_len);
      typename TmaRing<Config>::Barriers& barriers = *ring.barriers;
      Mbarrier* const k_full = &barriers.k_full[at.stage];
      Mbarrier* const v_full = &barriers.v_full[at.stage];
      mbarrier_wait(&barriers.empty[at.stage], at.parity ^ 1);
      const bool has_scales = Config::kInt8 && loads && pages.in_pool(here.page);
      int bytes = Tile::kBytes;
      if (Config::kInt8) bytes += __popc(__ballot_sync(0xffffffffu, has_scales)) * box_rows * 4;
      if (threadIdx.x % 32 == 0) {
        mbarrier_arrive_expect(k_full, bytes);
        mbarrier_arrive_expect(v_full, bytes);
      }
      __syncwarp();  // bytes are expected before they arrive
      char* const s_k = ring.tiles + at.stage * ring.kStageBytes + row * Tile::kRowBytes;
      const auto copy = [&](char* s_rows, const CUtensorMap& map, Mbarrier* full) {
#pragma unroll
        for (int panel = 0; panel < Tile::kCount; ++panel)
          copy_box(s_rows + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelColumns, here.token, part.kv_head,
                   here.page, full);
      };
      if (loads) copy(s_k, maps.k, k_full);
      if (has_scales)
        copy_bytes(ring.k_scales(at.stage) + row, scales_at(p.kv.k_scales, here, part.kv_head), box_rows * 4, k_full);
      if (loads) copy(s_k + Tile::kBytes, maps.v, v_full);
      if (has_scales)
        copy_bytes(ring.v_scales(at.stage) + row, scales_at(p.kv.v_scales, here, part.kv_head), box_rows * 4, v_full);
    }
  }
  let_next_grid_start();
}

}  // namespace decode
}  // namespace qf
