// The warpgroups that multiply: each owns 64 rows of the block's tile.
#pragma once

#include "attn/mma/state.cuh"
#include "kernels/sm90_fwd/output.cuh"
#include "kernels/sm90_fwd/shared.cuh"
#include "kernels/sm90_fwd/softmax.cuh"
#include "ptx/tid.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90_fwd {

enum class Aside { kSave, kRestore };

// kPlain: scales_plainly().
template <bool kPlain>
__device__ __forceinline__ void consume(const QfAttnParams& p, const Items& items, const Shared& s, bool out_aligned) {
  // Derived afresh where they are used: registers are scarce.
  const auto consumer = [] { return fresh_tid() / kGroupThreads - 1; };
  const auto lane = [] { return fresh_tid() % 32; };
  const auto warp_row = [] { return (fresh_tid() - kGroupThreads) / 32 * 16; };  // from the block's first
  const bool leads = lane() == 0;
  Place<kRecords> item;  // whose q is multiplied next
  Place<kQStages> q_place;
  Place<kStages> place;    // of K; that of V is the one before, once its K is released
  Place<kStages> checked;  // among the tiles of V that somebody inspects
  const float factor = score_factor(p.scale, p.softcap);
  float O[1][kOTiles][4], S[1][kNTiles][4];
  uint32_t P[kBlockN / 16][4];
  Rows rows;

  const AlongRows<QTile> q_tiles(s.q + consumer() * kGroupRows * kPanelRowBytes);
  const AlongRows<KVTile> k_tiles(s.k);
  const AlongChannels<KVTile> v_tiles(s.v);
  // As descriptors are wanted: the same for the warp, so that the compiler knows it, too.
  const auto uniform = [](auto x) {
    x.low = __shfl_sync(0xffffffffu, x.low, 0);
    return x;
  };
  const auto start_qk = [&](const AlongRows<QTile>& q, const AlongRows<KVTile>& k) {
    hold(S[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) Wgmma<Element, kBlockN>::multiply(S[0], q.step(i), k.step(i), i > 0);
    wgmma_commit();
  };
  const auto start_pv = [&](const AlongChannels<KVTile>& v) {
    hold(O[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) Wgmma<Element, kHeadDim>::template multiply<true>(O[0], P[i], v.step(i));
    wgmma_commit();
  };
  const auto outputs_aside = [&](Aside what) {
    if (kAsideBytes == 0) return;
    float* const s_own = s.aside + fresh_tid() - kGroupThreads;
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& s_value = s_own[(4 * j + e) * (kConsumers * kGroupThreads)];
        if (what == Aside::kSave)
          s_value = O[0][j][e];
        else
          O[0][j][e] = s_value;
      }
  };
  // The scores of this warp's rows once more, from the tiles of q and K that are still there. As qk_mma() does it,
  // which would have more of K in registers at once than there are.
  const auto scores_again = [&] {
#pragma unroll
    for (int j = 0; j < kNTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[0][j][e] = 0.0f;
    const char* s_q = s.q + q_place.stage() * QTile::kBytes + warp_row() * kPanelRowBytes;
    const char* s_k = s.k + place.stage() * KVTile::kBytes;
    constexpr int kChunks = kPanelRowBytes / 16;
    const auto q_lane = rows_then_chunks<kChunks>(lane());
    const auto k_lane = chunks_then_rows<kChunks>(lane());
#pragma unroll 1
    for (int pair = 0; pair < QTile::kCount * kChunks / 2; ++pair) {
      const int panel = pair / (kChunks / 2), in_panel = pair % (kChunks / 2);
      uint32_t q[4];
      ldmatrix_x4(q, s_q + panel * QTile::kPanelBytes + q_lane.at(0, in_panel));
#pragma unroll
      for (int j = 0; j < kNTiles; j += 2) {
        uint32_t k[4];
        ldmatrix_x4(k, s_k + panel * KVTile::kPanelBytes + k_lane.at(8 * j, in_panel));
        Tensor::multiply(S[0][j], q, k[0], k[1]);
        Tensor::multiply(S[0][j + 1], q, k[2], k[3]);
        if (__any_sync(0xffffffffu, q_lane.row_bytes < 0)) return;  // never: not all of K in registers at once
      }
    }
  };
  // Waits for the next item and sees to rows that no sequence fills. Returns its tiles.
  const auto look = [&] {
    item.wait_full(*s.record_ring);
    const Record& record = s.records[item.stage()];
    if (record.tiles >= 0 && record.unserved)
      fill_unserved_rows<Element, Consumers>(p, record.seq, record.b, record.h, record.row_tile, items.row_tiles, 0,
                                             p.head_dim, true);
    return record.tiles;
  };
  // To the next item that has keys, past those that have none, whose rows are zeros. False: there are no more.
  const auto seek = [&] {
    for (;; item.advance()) {
      const int tiles = look();
      if (tiles != 0) return tiles > 0;
      const Record& record = s.records[item.stage()];
      if (record.exists()) store_empty_rows(p, record);
      __syncwarp();  // every lane has read the record
      if (leads) item.release(*s.record_ring);
    }
  };
  const auto start_item = [&](bool exists) {
    const auto q = uniform(q_tiles.later(q_place.stage()));
    const auto k = uniform(k_tiles.later(place.stage()));
    if (exists) {
      q_place.wait_full(*s.q_ring);
      place.wait_full(*s.k_ring);
    }
    start_qk(q, k);
  };
  while (seek()) {
    start_item(true);
#pragma unroll 1
    for (bool more = true; more;) {  // an item whose first product is started
      const Place<kRecords> current = item;
      Record& record = s.records[current.stage()];
      // Does a row of this consumer see few keys? Their number is concave in the row: least in the first or the last.
      const auto few = [&] {
        const int first = record.row0 + consumer() * kGroupRows, last = min(first + kGroupRows, record.seq.len_q) - 1;
        const auto count = [&](int i) { return record.mask.visible(i).end - record.mask.visible(i).begin; };
        return first <= last && min(count(first), count(last)) < kFewKeys;
      };
      const KeyRange full = record.full;  // in registers, where there are enough
      const auto whole = [&](int key0) {
        return kConsumers > 2 ? record.whole(key0) : key0 >= full.begin && key0 + kBlockN <= full.end;
      };
      const auto wait_checked = [&](int key0) {
        if (!whole(key0)) mbarrier_wait(&s.v_checked[checked.stage()], checked.parity());
      };
      const auto show = [&](int key0) {  // scores as the rows see them
        if (!kPlain) scale_scores(S, p.scale, p.softcap);
        if (!whole(key0))
          mask_tile(S, TileMask<8>(record.mask, record.row0 + warp_row() + lane() / 4, key0 + lane() % 4 * 2));
      };
      const auto round_weights = [&](int key0) {
#pragma unroll
        for (int i = 0; i < kBlockN / 16; ++i) weights_of(P[i], S, i);
        if (!kKeepsRemainders || !few()) return;
        place.before().wait_full(*s.v_ring);
        wait_checked(key0);
        const auto v = v_tiles.later(place.before().stage());  // what rounding took off the weights, 16 keys at a time
#pragma unroll
        for (int i = 0; i < kBlockN / 16; ++i) {
          uint32_t a[4];
          weights_of<Remainder>(a, S, i);
          hold(O[0]);
          wgmma_fence();
          Wgmma<Element, kHeadDim>::template multiply<true>(O[0], a, v.step(i));
          wgmma_commit();
          wgmma_wait<0>();
          hold(O[0]);
        }
      };

#pragma unroll
      for (int j = 0; j < kOTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) O[0][j][e] = 0.0f;
      rows = Rows();
      int key0 = record.keys.begin;
      float rescale[2];
      wgmma_wait<0>();
      hold(S[0]);
      if (leads) place.release(*s.k_ring);
      place.advance();
      show(key0);
      move_reference(S, factor, rows, rescale);
      // Are maxima to be looked for in the next tile? Not once every row has a reference: scores seldom outgrow it by
      // much, and where they do the sums tell.
      bool calm = kPlain && rows.settled();
      rows.add(take_weights(S, factor, rows));
      bool k_there = place.is_full(*s.k_ring), v_there = place.before().is_full(*s.v_ring);
      round_weights(key0);
#pragma unroll 1
      for (int left = __shfl_sync(0xffffffffu, record.own_tiles[consumer()], 0) - 1; left > 0; --left) {
        const auto q = uniform(q_tiles.later(q_place.stage()));
        const auto k = uniform(k_tiles.later(place.stage()));
        const auto v = uniform(v_tiles.later(place.before().stage()));
        if (!k_there) place.wait_full(*s.k_ring);
        start_qk(q, k);
        if (!v_there) place.before().wait_full(*s.v_ring);
        wait_checked(key0);
        start_pv(v);
        if (!whole(key0)) checked.advance();
        key0 += kBlockN;
        wgmma_wait<1>();
        hold(S[0]);
        bool moved = false;
        if (!calm || !whole(key0)) {
          show(key0);
          if (!calm) {
            moved = move_reference(S, factor, rows, rescale);
            calm = kPlain && !moved && rows.settled();
          }
        }
        TileSums sums = take_weights(S, factor, rows);
        const bool outgrown = kPlain && __any_sync(0xffffffffu, fmaxf(sums.of[0], sums.of[1]) > kMostWeight);
        // The sums are never negative. Asking keeps the weights, and all that leads to them, before the wait that
        // follows, where ptxas would not leave them.
        if (kPlain ? outgrown && __any_sync(0xffffffffu, rows.l[0] < 0.0f)
                   : __any_sync(0xffffffffu, sums.of[0] + sums.of[1] < 0.0f))
          __trap();
        k_there = place.after().is_full(*s.k_ring);
        v_there = place.is_full(*s.v_ring);
        wgmma_wait<0>();
        hold(O[0]);
        if (outgrown) {
          outputs_aside(Aside::kSave);
          scores_again();
          show(key0);
          moved = move_reference(S, factor, rows, rescale);
          calm = false;
          sums = take_weights(S, factor, rows);
          outputs_aside(Aside::kRestore);
        }
        rows.add(sums);
        if (leads) place.release(*s.k_ring);
        if (leads) place.before().release(*s.v_ring);
        place.advance();
        if (moved) rescale_outputs(O, rescale);
        round_weights(key0);
      }
      const Place<kStages> v_place = place.before();
      v_place.wait_full(*s.v_ring);
      wait_checked(key0);
      start_pv(uniform(v_tiles.later(v_place.stage())));
      if (!whole(key0)) checked.advance();
      // Tiles that only other consumers see.
      const auto others = [&] { return kSkipsTiles ? record.tiles - record.own_tiles[consumer()] : 0; };
      if (others() > 0) {
        wgmma_wait<0>();
        hold(O[0]);
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
      // whatever is there, for nobody, where that item has no keys.
      more = false;
      if (kQStages > 1) {
        more = look() > 0;
        start_item(more);
        wgmma_wait<1>();
      } else {
        if (leads) q_done.release(*s.q_ring);
        wgmma_wait<0>();
      }
      hold(O[0]);
      if (leads && others() == 0) v_place.release(*s.v_ring);
      char* const s_rows = s.q + q_done.stage() * QTile::kBytes + warp_row() * kPanelRowBytes;
      finish(p, record, O, rows, s_rows, warp_row(), lane(), out_aligned);
      if (kOutThroughQ) fence_proxy_async();  // what went through q's stage, before the copy engine fills it again
      __syncwarp();                           // every lane has read the record, and its rows
      if (leads) current.release(*s.record_ring);
      if (kQStages > 1 && leads) q_done.release(*s.q_ring);
    }
    wgmma_wait<0>();
  }
}

}  // namespace sm90_fwd
}  // namespace qf
