// The warpgroup that brings work to the others: one thread plans, one copies, two warps inspect what was copied.
#pragma once

#include <cuda.h>

#include "attn/wgmma/shared.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace sm90 {

struct Maps {
  CUtensorMap q, k, v;
};

// Where a sequence's keys begin in a transposed V: packed ones at whole tiles of kPackedFrom.
constexpr int kPackedFrom = 128;
__device__ __forceinline__ int64_t transposed_from(const QfAttnParams& p, const Record& record) {
  return p.cu_seqlens_q ? (record.seq.k0 / kPackedFrom + record.b) * kPackedFrom : 0;
}

// One thread plans the items.
template <class Math>
__device__ __forceinline__ void plan(const QfAttnParams& p, const typename Math::Params& params, const Items& items,
                                     const Shared& s, bool rows_fall) {
  Place<kRecords> place;
  uint32_t parity = 0;
  const bool rows_outside = p.cu_seqlens_q && (p.cu_seqlens_q[0] > 0 || p.cu_seqlens_q[p.batch] < p.total_q);
  const auto wanted = [&] {
    mbarrier_wait(s.wanted, parity);
    parity ^= 1;
  };
  for_each_item(p, items, wanted, [&](const Item& item) {
    place.wait_empty(*s.record_ring);
    s.records[place.stage()].fill(p, item, rows_fall, rows_outside);
    // From memory: there are not registers enough to remember all of it.
    Record& record = *reinterpret_cast<Record*>(opaque_shared(reinterpret_cast<char*>(&s.records[place.stage()])));
    record.complete(p);
    if (record.tiles > 0) Math::note(params, record);
    place.fill(*s.record_ring);
    place.advance();
  });
  place.wait_empty(*s.record_ring);
  s.records[place.stage()].tiles = -1;
  s.records[place.stage()].unserved = false;
  place.fill(*s.record_ring);
}

// Another brings their tiles. K of tile n + 1 is wanted before V of tile n, but its stage becomes empty no earlier.
__device__ __forceinline__ void produce(const QfAttnParams& p, const Items& items, const Maps& maps, const Shared& s) {
  Place<kRecords> item;
  Place<kQStages> q_place;
  Place<kStages> k_place, v_place;
  for (;; item.release(*s.record_ring), item.advance()) {
    item.wait_full(*s.record_ring);
    const Record& record = s.records[item.stage()];
    const int tiles = record.tiles;
    if (tiles < 0) return;
    // The later an item is drawn, the better for balance; but not so late that somebody waits for it.
    constexpr int kAhead = 3;  // tiles
    const auto want_next = [&] {
      if (items.drawn) mbarrier_arrive(s.wanted);
    };
    if (tiles <= kAhead) want_next();
    if (tiles == 0) continue;
    const int b = p.cu_seqlens_q ? 0 : record.b, kv_head = record.kv_head;
    const int first_key = int(record.seq.k0) + record.keys.begin;
    const int first_column = int(transposed_from(p, record)) + record.keys.begin;
    const auto load = [&](auto& place, auto& ring, char* s_tiles, const CUtensorMap& map, auto tile, int column,
                          int row, int h) {
      using Tile = decltype(tile);
      Mbarrier* const full = &ring.full[place.stage()];
      char* const s_tile = s_tiles + place.stage() * Tile::kBytes;
      place.wait_empty(ring);
      mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kCount; ++panel)
        copy_box(s_tile + panel * Tile::kPanelBytes, &map, column + panel * Tile::kPanelColumns, row, h, b, full);
      place.advance();
    };
    const auto load_k = [&](int n) {
      load(k_place, *s.k_ring, s.k, maps.k, KTile(), 0, first_key + n * kBlockN, kv_head);
    };
    const auto load_v = [&](int n) {
      const int along = n * kBlockN;
      load(v_place, *s.v_ring, s.v, maps.v, VTile(), kVTransposed ? first_column + along : 0,
           kVTransposed ? 0 : first_key + along, kv_head);
    };
    load(q_place, *s.q_ring, s.q, maps.q, QTile(), 0, int(record.seq.q0) + record.row0, record.h);
    for (int n = 0; n < tiles; ++n) {
      if (n > 0 && n + kAhead == tiles) want_next();
      load_k(n);
      load_v(n);
    }
  }
}

// Two warps look at the tiles of V that some rows see only in part: NaN and infinity become zero there, and the record
// says so, because the zero weight of a masked key would not blank them out. finish() adds them to the rows that do see
// them.
constexpr int kInspectors = 64;  // threads

// Look: wanted(record) says whether tiles of that item's V are to be looked at, and clear(s_tile, thread) sets NaN and
// infinity in one to zero and tells whether there were any.
template <class Look>
__device__ __forceinline__ void inspect(const Shared& s, int thread, Look look) {
  Place<kRecords> item;
  Place<kStages> place, checked;
  for (;; item.advance()) {
    item.wait_full(*s.record_ring);
    Record& record = s.records[item.stage()];
    const int tiles = record.tiles;
    if (tiles < 0) return;
    const bool wanted = tiles > 0 && look.wanted(record);
    for (int n = 0; n < tiles; ++n, place.advance()) {
      place.wait_full(*s.v_ring);
      const bool whole = record.whole(record.keys.begin + n * kBlockN);
      const bool found = !whole && wanted && look.clear(s.v + place.stage() * VTile::kBytes, thread);
      const bool spoiled = __any_sync(0xffffffffu, found);
      __syncwarp();  // the zeros of every lane are in place
      if (thread % 32 == 0) {
        if (spoiled) record.spoiled = 1;
        if (!whole) mbarrier_arrive(&s.v_checked[checked.stage()]);
        place.release(*s.v_ring);  // without which another could arrive there, and its phase be taken for this one's
      }
      if (!whole) checked.advance();
    }
    __syncwarp();  // every lane has read the record
    if (thread % 32 == 0) item.release(*s.record_ring);
  }
}

}  // namespace sm90
}  // namespace qf
