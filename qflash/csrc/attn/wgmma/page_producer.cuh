// produce(), if K and V are pages of a cache: run by a warp, because a tile of keys takes as many boxes as its pages
// require.
//
// In the tensor maps of K and V the page index takes the place of the batch. A box has as many rows as divide both a
// page and a tile and begins at a multiple of that, so it lies in one page. Lane j looks up the page of the tile's box
// j, one tile ahead of its copy, and copies it: kBlockN / box_rows boxes, 8 at most (tiles of 128 keys, pages of 16).
// Boxes past the sequence's last token, and before the first that a row sees, may have no page: they address the page
// past the last one, for which TMA fills zeros. What a page holds after the last token is masked, like what an array
// holds after kv_lens.
#pragma once

#include "attn/pages.cuh"
#include "attn/wgmma/producer.cuh"

namespace qf {
namespace wgmma {

// The number of rows of a box of K and V. tile_power: the largest power of two that divides a tile of keys.
__host__ __device__ __forceinline__ int page_box_rows(int page_size, int tile_power) {
  const int page_power = page_size & -page_size;
  return page_power < tile_power ? page_power : tile_power;
}

// The box of a tile that a lane copies, if any.
struct PageBox {
  int row;   // the box's first row in the tile
  int rows;  // 0: this lane has none

  template <class Tile, int kStages>
  __device__ __forceinline__ void load(RingPosition<kStages>& at, Ring<kStages>& ring, char* s_tiles,
                                       const CUtensorMap& map, int row_of_page, int head, int page) const {
    Mbarrier* const full = &ring.full[at.stage()];
    char* const s_box = s_tiles + at.stage() * Tile::kBytes + row * Tile::kRowBytes;
    at.wait_empty(ring);
    if (row == 0) mbarrier_arrive_expect(full, Tile::kBytes);
    __syncwarp();  // the barrier knows how many bytes to wait for
    if (rows > 0) {
#pragma unroll
      for (int panel = 0; panel < Tile::kCount; ++panel)
        copy_box(s_box + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelColumns, row_of_page, head, page, full);
    }
    at.advance();
  }
};

template <class Config>
__device__ __forceinline__ void produce_pages(const QfAttnParams& p, const TileSchedule& schedule,
                                              const TensorMaps& maps, const SharedMemory<Config>& s) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  static_assert(!Config::kVTransposed, "pages hold V as they hold K");
  const int lane = int(threadIdx.x % 32);
  const bool leads = lane == 0;
  const int box_rows = page_box_rows(p.kv.page_size, Config::kFirstKey);
  const PageBox box = {lane * box_rows, lane * box_rows < Config::kBlockN ? box_rows : 0};
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<Config::kQStages> q_at;
  RingPosition<Config::kStages> k_at, v_at;
  for (;; work_at.advance()) {
    work_at.wait_full(*s.work_ring);
    const WorkTile<Config>& work = s.work[work_at.stage()];
    const int tiles = work.tiles;
    if (tiles < 0) return;
    constexpr int kAhead = 3;  // tiles of keys, as in produce()
    const auto let_take = [&] {
      if (schedule.dynamic && leads) mbarrier_arrive(s.next_tile);
    };
    if (tiles <= kAhead) let_take();
    if (tiles > 0) {
      const PageRow table(p.kv, work.b);
      const int kv_head = work.kv_head, len_k = work.seq.len_k;
      const auto page_of = [&](int token) {
        const int page = box.rows > 0 && token < len_k ? table.page_of(token) : -1;
        return page < 0 ? table.pages : page;  // past the last page
      };
      int token = work.keys.begin + box.row, page = page_of(token);
      if (leads)
        load_tile<QTile>(q_at, *s.q_ring, s.q, maps.q, 0, int(work.seq.q0) + work.row0, work.h,
                         p.cu_seqlens_q ? 0 : work.b);
      for (int n = 0; n < tiles; ++n) {
        if (n > 0 && n + kAhead == tiles) let_take();
        const int next = page_of(token + Config::kBlockN), row_of_page = table.in_page(token);
        box.load<KTile>(k_at, *s.k_ring, s.k, maps.k, row_of_page, kv_head, page);
        box.load<KTile>(v_at, *s.v_ring, s.v, maps.v, row_of_page, kv_head, page);
        page = next;
        token += Config::kBlockN;
      }
    }
    __syncwarp();  // every lane has read the work tile
    if (leads) work_at.release(*s.work_ring);
  }
}

}  // namespace wgmma
}  // namespace qf
