// The warpgroups that multiply: each owns 64 rows of the block's tile.
#pragma once

#include "attn/mma/state.cuh"
#include "kernels/sm90_fwd/output.cuh"
#include "kernels/sm90_fwd/shared.cuh"
#include "kernels/sm90_fwd/softmax.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tid.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90_fwd {

// Consumers take turns at the tensor cores: each waits for its own barrier, which the one before it arrives at.
struct Turn {
  static constexpr int kFirstBarrier = 1;  // 0 is the block's
  int own, next;

  __device__ __forceinline__ explicit Turn(int consumer)
      : own(kFirstBarrier + consumer), next(kFirstBarrier + (consumer + 1) % kConsumers) {}
  __device__ __forceinline__ void wait() const { named_barrier_sync(own, 2 * kGroupThreads); }
  __device__ __forceinline__ void pass() const { named_barrier_arrive(next, 2 * kGroupThreads); }
};

// kPlain: scales_plainly().
template <bool kPlain>
__device__ __forceinline__ void consume(const QfAttnParams& p, const Items& items, const Shared& s, bool out_aligned) {
  // Derived afresh where they are used: registers are scarce.
  const auto consumer = [] { return fresh_tid() / kGroupThreads - 1; };
  const auto lane = [] { return fresh_tid() % 32; };
  const auto warp_row = [] { return (fresh_tid() - kGroupThreads) / 32 * 16; };  // from the block's first
  if (consumer() == kConsumers - 1) Turn(consumer()).pass();                     // the first one's first turn
  Place<kRecords> item;                                                          // whose q is multiplied next
  Place<kQStages> q_place;
  Place<kStages> place;    // of K; that of V is the one before, once its K is released
  Place<kStages> checked;  // among the tiles of V that somebody inspects
  const float factor = score_factor(p.scale, p.softcap);
  float O[1][kOTiles][4], S[1][kNTiles][4];
  uint32_t P[kBlockN / 16][4];
  Rows rows;

  const auto release_k = [&] {
    if (lane() == 0) place.release(*s.k_ring);
    place.advance();
  };
  // Descriptors are made before the waits for what they describe: that takes a while, too.
  const auto q_rows = [&] {
    return AlongRows<QTile>(s.q + q_place.stage() * QTile::kBytes + consumer() * kGroupRows * kPanelRowBytes);
  };
  const auto k_rows = [&] { return AlongRows<KVTile>(s.k + place.stage() * KVTile::kBytes); };
  const auto v_channels = [&] { return AlongChannels<KVTile>(s.v + place.before().stage() * KVTile::kBytes); };
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
  // To the next item that has keys, past those that have none, whose rows are zeros. False: there are no more.
  const auto seek = [&] {
    for (;; item.advance()) {
      item.wait_full(*s.record_ring);
      const Record& record = s.records[item.stage()];
      if (record.tiles < 0) return false;
      fill_unserved_rows<Element, Consumers>(p, record.seq, record.b, record.h, record.row_tile, items.row_tiles, 0,
                                             p.head_dim, true);
      if (record.tiles > 0) return true;
      if (record.exists()) store_empty_rows(p, record);
      __syncwarp();  // every lane has read the record
      if (lane() == 0) item.release(*s.record_ring);
    }
  };

  const auto wait_qk = [&] {
    q_place.wait_full(*s.q_ring);
    place.wait_full(*s.k_ring);
  };

  if (!seek()) return;
  wait_qk();
  start_qk(q_rows(), k_rows());
#pragma unroll 1
  for (bool more = true; more;) {
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
    const auto wait_v = [&](int key0) {
      place.before().wait_full(*s.v_ring);
      if (!whole(key0)) mbarrier_wait(&s.v_checked[checked.stage()], checked.parity());
    };
    // Scores to weights, but for O, which may be under way: returns whether it must be rescaled.
    float rescale[2];
    const auto softmax = [&](int key0) {
      if (!kPlain) scale_scores(S, p.scale, p.softcap);
      if (!whole(key0))
        mask_tile(S, TileMask<8>(record.mask, record.row0 + warp_row() + lane() / 4, key0 + lane() % 4 * 2));
      const bool moved = move_reference(S, factor, rows, rescale);
      take_weights(S, factor, rows);
      return moved;
    };
    const auto round_weights = [&](int key0) {
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i) weights_of(P[i], S, i);
      if (!kKeepsRemainders || !few()) return;
      wait_v(key0);  // what rounding took off the weights, 16 keys at a time
      const AlongChannels<KVTile> v(s.v + place.before().stage() * KVTile::kBytes);
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
    wgmma_wait<0>();
    hold(S[0]);
    release_k();
    softmax(key0);
    round_weights(key0);
#pragma unroll 1
    for (int left = record.tiles - 1; left > 0; --left) {
      const auto q = q_rows();
      const auto k = k_rows();
      const auto v = v_channels();
      place.wait_full(*s.k_ring);
      wait_v(key0);
      Turn(consumer()).wait();
      start_qk(q, k);
      start_pv(v);
      Turn(consumer()).pass();
      if (!whole(key0)) checked.advance();
      key0 += kBlockN;
      wgmma_wait<1>();
      hold(S[0]);
      release_k();
      const bool moved = softmax(key0);
      // The weights are never negative. Asking keeps them, and all that leads to them, before the wait that follows,
      // where ptxas would not leave them.
      if (__any_sync(0xffffffffu, rows.l[0] + rows.l[1] < 0.0f)) __trap();
      wgmma_wait<0>();
      hold(O[0]);
      if (moved) rescale_outputs(O, rescale);
      if (lane() == 0) place.before().before().release(*s.v_ring);
      round_weights(key0);
    }
    const auto v = v_channels();
    wait_v(key0);
    start_pv(v);
    if (!whole(key0)) checked.advance();
    if (lane() == 0) q_place.release(*s.q_ring);
    q_place.advance();
    item.advance();
    const Place<kStages> v_place = place.before();
    more = seek();
    const auto q = q_rows();
    const auto k = k_rows();
    if (more) wait_qk();
    start_qk(q, k);  // runs while this item is finished; of whatever is there, for nobody, where there are no more
    wgmma_wait<1>();
    hold(O[0]);
    if (lane() == 0) v_place.release(*s.v_ring);
    finish(p, record, O, rows, warp_row(), lane(), out_aligned);
    __syncwarp();  // every lane has read the record
    if (lane() == 0) current.release(*s.record_ring);
  }
  wgmma_wait<0>();
}

}  // namespace sm90_fwd
}  // namespace qf
