// The warpgroups that multiply: each owns 64 rows of the block's tile. When what is waited for, started and released;
// what is computed is the kernel's Math (kernels/attention/sm90_fwd/math.cuh is the plainest).
#pragma once

#include "attn/wgmma/output.cuh"
#include "attn/wgmma/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90 {

template <class Math>
__device__ __forceinline__ void consume(const QfAttnParams& p, const typename Math::Params& params, const Items& items,
                                        const Shared& s, bool out_aligned) {
  const bool leads = lane_of() == 0;
  Place<kRecords> item;  // whose q is multiplied next
  Place<kQStages> q_place;
  Place<kStages> place;    // of K; that of V is the one before, once its K is released
  Place<kStages> checked;  // among the tiles of V that somebody inspects
  Math math(params, s);

  const AlongRows<QTile> q_tiles(s.q + consumer_of() * kGroupRows * QTile::kRowBytes);
  const typename Math::Keys k_tiles(s.k);
  const typename Math::Values v_tiles(s.v);
  // As descriptors are wanted: the same for the warp, so that the compiler knows it, too.
  const auto uniform = [](auto x) {
    x.low = __shfl_sync(0xffffffffu, x.low, 0);
    return x;
  };
  // Waits for the next item.
  const auto look = [&]() -> const Record& {
    item.wait_full(*s.record_ring);
    return s.records[item.stage()];
  };
  // To the next item that has keys, past those that have none, whose rows are zeros. Sees to rows that no sequence
  // fills. False: there are no more.
  const auto seek = [&] {
    for (;; item.advance()) {
      const Record& record = look();
      if (record.unserved)
        fill_unserved_rows<Element, Consumers>(p, record.seq, record.b, record.h, record.row_tile, items.row_tiles, 0,
                                               p.head_dim, true);
      if (record.tiles != 0) return record.tiles > 0;
      if (record.exists()) store_empty_rows(p, record);
      __syncwarp();  // every lane has read the record
      if (leads) item.release(*s.record_ring);
    }
  };
  const auto start_item = [&](bool exists) {
    const auto q = uniform(q_tiles.later(q_place.stage()));
    const auto k = uniform(k_tiles.later(place.stage()));
    if (exists) {
      math.foresee(s.records[item.stage()]);
      q_place.wait_full(*s.q_ring);
      place.wait_full(*s.k_ring);
    }
    math.start_scores(q, k);
  };
  while (seek()) {
    start_item(true);
#pragma unroll 1
    for (bool more = true; more;) {  // an item whose first product is started
      const Place<kRecords> current = item;
      Record& record = s.records[current.stage()];
      const KeyRange full = record.full;  // in registers, where there are enough
      const auto whole = [&](int key0) {
        return kConsumers > 2 ? record.whole(key0) : key0 >= full.begin && key0 + kBlockN <= full.end;
      };
      int key0 = record.keys.begin;
      bool is_whole = whole(key0);  // the tile at key0
      const auto wait_checked = [&] {
        if (!is_whole) mbarrier_wait(&s.v_checked[checked.stage()], checked.parity());
      };
      const auto await_v = [&] {
        place.before().wait_full(*s.v_ring);
        wait_checked();
        return place.before().stage();
      };
      const int own_tiles = __shfl_sync(0xffffffffu, record.own_tiles[consumer_of()], 0);
      math.begin(record);
      wgmma_wait<0>();
      math.hold_scores();
      const auto release_k = [&] {
        if (leads) place.release(*s.k_ring);
        place.advance();
      };
      const auto release = [&] {
        if (leads) place.before().release(*s.v_ring);
        release_k();
      };
      math.open(record, key0, is_whole, place.stage(), release_k, await_v);
      bool k_there = place.is_full(*s.k_ring), v_there = place.before().is_full(*s.v_ring);
      const auto q = uniform(q_tiles.later(q_place.stage()));
      // The products that a tile begins with: its scores, and the outputs of the tile before. copy: of this code.
      const auto start_tile = [&](int copy, auto wait_for_v) {
        const auto k = uniform(k_tiles.later(place.stage()));
        const auto v = uniform(v_tiles.later(place.before().stage()));
        wgmma_copy(copy);
        if (!k_there) place.wait_full(*s.k_ring);
        math.start_scores(q, k);
        if (!v_there) place.before().wait_full(*s.v_ring);
        wait_for_v();
        math.start_outputs(v);
        wgmma_copy(0);
      };
      const auto look_ahead = [&] {
        k_there = place.after().is_full(*s.k_ring);
        v_there = place.is_full(*s.v_ring);
      };
      const auto finish_outputs = [&] {
        wgmma_wait<0>();
        math.hold_outputs();
      };
      const auto any_tile = [&] {
        math.template fetch<false>();
        start_tile(0, wait_checked);
        if (!is_whole) checked.advance();
        key0 += kBlockN;
        is_whole = whole(key0);
        wgmma_wait<1>();
        math.hold_scores();
        math.weigh(record, key0, is_whole, place.stage());
        look_ahead();
        finish_outputs();
        math.round();
      };
#pragma unroll 1
      for (int left = own_tiles - 1; left > 0; --left) {
        if constexpr (Math::kRuns) {
          // Tiles that every row sees, after another such, and that ask for nothing else have a loop of their own,
          // without a branch on the way but for stages that are not there yet. The last of them is closed as any tile
          // is. The warps of a consumer are all in this loop or none is: they start products together.
          int run = is_whole ? math.steady(left, (full.end - key0) / kBlockN - 1) : 0;
          run = __shfl_sync(0xffffffffu, run, 0);  // the same for the warp, as the compiler is to know
          if (run > 0) {
#pragma unroll 1
            for (;; --left) {
              math.template fetch<true>();
              start_tile(1, [] {});
              key0 += kBlockN;
              wgmma_wait<1>();
              math.hold_scores();
              const bool rare = math.weigh_steady(finish_outputs);
              look_ahead();
              if (rare || --run == 0) break;
              math.pass();
              release();
            }
          } else {
            any_tile();
          }
        } else {
          any_tile();
        }
        math.close(record, key0, is_whole, q_place.stage(), place.stage(), left, release, await_v);
      }
      const Place<kStages> v_place = place.before();
      v_place.wait_full(*s.v_ring);
      wait_checked();
      math.start_outputs(uniform(v_tiles.later(v_place.stage())));
      math.foresee_store(record);
      if (!is_whole) checked.advance();
      // Tiles that only other consumers see.
      const auto others = [&] { return kSkipsTiles ? record.tiles - record.own_tiles[consumer_of()] : 0; };
      if (others() > 0) {
        wgmma_wait<0>();
        math.hold_outputs();
        if (leads) v_place.release(*s.v_ring);  // where one of them may belong
        for (int n = others(); n > 0; --n) {
          key0 += kBlockN;
          place.wait_full(*s.k_ring);
          place.wait_full(*s.v_ring);
          __syncwarp();  // every lane has seen them, before the next can take their place
          if (leads) place.release(*s.k_ring);
          if (leads) place.release(*s.v_ring);
          place.advance();
          if (!whole(key0)) checked.advance();
        }
      }
      const Place<kQStages> q_done = q_place;
      q_place.advance();
      item.advance();
      // The first product of the next item runs while this one is finished, if its q has a stage of its own; of
      // whatever is there, for nobody, where seek() has to see to that item first.
      more = false;
      if (kQStages > 1) {
        const Record& next = look();
        more = next.tiles > 0 && !next.unserved;
        start_item(more);
        wgmma_wait<1>();
      } else {
        if (leads) q_done.release(*s.q_ring);
        wgmma_wait<0>();
      }
      math.hold_outputs();
      if (leads && others() == 0) v_place.release(*s.v_ring);
      math.store(record, q_done.stage(), out_aligned);
      __syncwarp();  // every lane has read the record, and its rows
      if (leads) current.release(*s.record_ring);
      if (kQStages > 1 && leads) q_done.release(*s.q_ring);
    }
    wgmma_wait<0>();
  }
}

}  // namespace sm90
}  // namespace qf
