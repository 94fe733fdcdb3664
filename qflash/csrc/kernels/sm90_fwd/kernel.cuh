// sm90_fwd: attention for Hopper. The copy engine fills shared memory, warpgroup products empty it, and the softmax of
// one warpgroup runs under the products of another.
#pragma once

#include <cuda.h>

#include "attn/mma/nonfinite.cuh"
#include "attn/mma/output.cuh"
#include "attn/mma/state.cuh"
#include "attn/sequence.cuh"
#include "hopper/ring.cuh"
#include "kernels/sm90_fwd/config.h"
#include "kernels/sm90_fwd/items.cuh"
#include "kernels/sm90_fwd/output.cuh"
#include "kernels/sm90_fwd/softmax.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/rcp.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/tid.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace sm90_fwd {

struct Maps {
  CUtensorMap q, k, v;
};

struct Shared {
  char *q, *k, *v;  // kQStages and kStages tiles
  Ring<kQStages>* q_ring;
  Ring<kStages>*k_ring, *v_ring;
  Mbarrier* v_checked;  // kStages: the tile of V holds nothing that zero weights would not blank out
  Ring<kRecords>* record_ring;
  Record* records;

  __device__ __forceinline__ explicit Shared(char* memory) {
    q = memory + (kSwizzleBytes - shared_address(memory) % kSwizzleBytes) % kSwizzleBytes;
    k = q + kQStages * QTile::kBytes;
    v = k + kStages * KVTile::kBytes;
    q_ring = reinterpret_cast<Ring<kQStages>*>(v + kStages * KVTile::kBytes);
    k_ring = reinterpret_cast<Ring<kStages>*>(q_ring + 1);
    v_ring = k_ring + 1;
    v_checked = reinterpret_cast<Mbarrier*>(v_ring + 1);
    record_ring = reinterpret_cast<Ring<kRecords>*>(v_checked + kStages);
    records = reinterpret_cast<Record*>(record_ring + 1);
  }
};

// One thread plans the items.
__device__ __forceinline__ void plan(const QfAttnParams& p, const Items& items, const Shared& s, bool rows_fall) {
  Place<kRecords> place;
  for_each_item(p, items, [&](const Item& item) {
    place.wait_empty(*s.record_ring);
    s.records[place.stage()].fill(p, item, rows_fall);
    place.fill(*s.record_ring);
    place.advance();
  });
  place.wait_empty(*s.record_ring);
  s.records[place.stage()].tiles = -1;
  place.fill(*s.record_ring);
}

// Another brings their tiles: q, then K of tile n + 1 before V of tile n, as they will be used.
__device__ __forceinline__ void produce(const QfAttnParams& p, const Maps& maps, const Shared& s) {
  Place<kRecords> item;
  Place<kQStages> q_place;
  Place<kStages> k_place, v_place;
  const int group = p.q_heads / p.kv_heads;
  for (;; item.release(*s.record_ring), item.advance()) {
    item.wait_full(*s.record_ring);
    const Record& record = s.records[item.stage()];
    const int tiles = record.tiles;
    if (tiles < 0) return;
    if (tiles == 0) continue;
    const int b = p.cu_seqlens_q ? 0 : record.b, kv_head = record.h / group;
    const int first_key = int(record.seq.k0) + record.keys.begin;
    const auto load = [&](auto& place, auto& ring, char* s_tiles, const CUtensorMap& map, auto tile, int row, int h) {
      using Tile = decltype(tile);
      Mbarrier* const full = &ring.full[place.stage()];
      char* const s_tile = s_tiles + place.stage() * Tile::kBytes;
      place.wait_empty(ring);
      mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kCount; ++panel)
        copy_box(s_tile + panel * Tile::kPanelBytes, &map, panel * kPanelChannels, row, h, b, full);
      place.advance();
    };
    const auto load_k = [&](int n) {
      load(k_place, *s.k_ring, s.k, maps.k, KVTile(), first_key + n * kBlockN, kv_head);
    };
    const auto load_v = [&](int n) {
      load(v_place, *s.v_ring, s.v, maps.v, KVTile(), first_key + n * kBlockN, kv_head);
    };
    load(q_place, *s.q_ring, s.q, maps.q, QTile(), int(record.seq.q0) + record.row0, record.h);
    load_k(0);
    for (int n = 1; n < tiles; ++n) {
      load_k(n);
      load_v(n - 1);
    }
    load_v(tiles - 1);
  }
}

// Consumers take turns at the tensor cores: each waits for its own barrier, which the one before it arrives at.
struct Turn {
  static constexpr int kFirstBarrier = 2;  // 0 is the block's, 1 for consumers together
  int own, next;

  __device__ __forceinline__ explicit Turn(int consumer)
      : own(kFirstBarrier + consumer), next(kFirstBarrier + (consumer + 1) % kConsumers) {}
  __device__ __forceinline__ void wait() const {
#ifndef QF_NO_TURN
    named_barrier_sync(own, 2 * kGroupThreads);
#endif
  }
  __device__ __forceinline__ void pass() const {
#ifndef QF_NO_TURN
    named_barrier_arrive(next, 2 * kGroupThreads);
#endif
  }
};

// Two warps look at the tiles of V that some rows see only in part: NaN and infinity become zero there, and the record
// says so, because the zero weight of a masked key would not blank them out. finish() adds them to the rows that do see
// them.
constexpr int kInspectors = 64;  // threads

// Sets NaN and infinity in a tile of V to zero; `spoiled` tells whether there were any. For kInspectors threads.
__device__ inline void clear_nonfinite_tile(char* s_tile, int& spoiled, int thread) {
  bool found = false;
#pragma unroll 8
  for (int i = thread; i < KVTile::kBytes / 16; i += kInspectors) {
    const uint4 x = *reinterpret_cast<const uint4*>(s_tile + 16 * i);
    found |= word_nonfinite<Element>(x.x) | word_nonfinite<Element>(x.y) | word_nonfinite<Element>(x.z) |
             word_nonfinite<Element>(x.w);
  }
  if (!found) return;
  spoiled = 1;
  for (int i = thread; i < KVTile::kBytes / 16; i += kInspectors) {
    uint16_t* const s_chunk = reinterpret_cast<uint16_t*>(s_tile + 16 * i);
    for (int e = 0; e < kPerChunk; ++e)
      if (word_nonfinite<Element>(s_chunk[e])) s_chunk[e] = 0;
  }
  fence_proxy_async();
}

__device__ __forceinline__ void inspect(const Shared& s, int thread) {
  Place<kRecords> item;
  Place<kStages> place;
  for (;; item.advance()) {
    item.wait_full(*s.record_ring);
    Record& record = s.records[item.stage()];
    const int tiles = record.tiles;
    if (tiles < 0) return;
    for (int n = 0; n < tiles; ++n, place.advance()) {
      place.wait_full(*s.v_ring);
      if (!record.whole(record.keys.begin + n * kBlockN))
        clear_nonfinite_tile(s.v + place.stage() * KVTile::kBytes, record.spoiled, thread);
      __syncwarp();  // the zeros of every lane are in place
      if (thread % 32 == 0) mbarrier_arrive(&s.v_checked[place.stage()]);
    }
    __syncwarp();  // every lane has read the record
    if (thread % 32 == 0) item.release(*s.record_ring);
  }
}

// Divides a warp's rows by their sums of weights and stores them. warp_row: from the block's first.
__device__ __forceinline__ void finish(const QfAttnParams& p, const Record& record, float (&O)[1][kOTiles][4],
                                       const Rows& rows, int warp_row, int lane, bool aligned) {
  const int b = record.b, h = record.h, row0 = record.row0 + warp_row, len_q = record.seq.len_q;
  float* const g_lse = p.lse ? p.lse + b * p.lse_stride_b + h * p.lse_stride_h + record.seq.q0 : nullptr;
  Element* const g_out = static_cast<Element*>(p.out.data) + b * p.out.stride_b + h * p.out.stride_h +
                         (record.seq.q0 + row0) * p.out.stride_t;  // the warp's first row
  Element* g_row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = lane / 4 + 8 * r;
    float sum = rows.l[r] + __shfl_xor_sync(0xffffffffu, rows.l[r], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool exists = row0 + i < len_q;
    float inverse = rcp(sum), lse = lse_of(rows.m[r], sum);
    if (!(sum > 0.0f)) {  // a row that sees no key has zeros; one whose scores were all -inf, or NaN, has NaN
      const KeyRange keys = record.mask.visible(row0 + i);
      if (keys.begin == keys.end) inverse = 0.0f, lse = -infinity();
    }
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) O[0][j][2 * r + e] *= inverse;
    if (g_lse && lane % 4 == 0 && exists) g_lse[row0 + i] = lse;
    g_row[r] = exists ? g_out + i * p.out.stride_t : nullptr;
  }
  store_rows(O, g_row, p.head_dim, aligned, lane);
  if (!record.spoiled) return;
  const HeadRows<Element> v(p.v, b, record.seq.k0, h / (p.q_heads / p.kv_heads), 0, 0, false);
  __syncwarp();  // other lanes change what this one stored
  for (int key0 = record.keys.begin; key0 < record.keys.end; key0 += kBlockN)
    if (!record.whole(key0))
      add_nonfinite_at([&](int i, int d) -> Element& { return g_out[i * p.out.stride_t + d]; }, row0,
                       min(16, len_q - row0), p.head_dim, key0, kBlockN, record.mask, lane,
                       [&](int j, int d) { return to_float(v.row(j)[d]); });
}

// Rows of an item that sees no key at all: zeros, and lse of -inf.
__device__ inline void store_empty_rows(const QfAttnParams& p, const Record& record) {
  const int rows = min(kBlockM, record.seq.len_q - record.row0);
  for (int i = fresh_tid() - kGroupThreads; i < rows; i += kConsumers * kGroupThreads) {
    const int64_t row = record.seq.q0 + record.row0 + i;
    Element* const g_row = static_cast<Element*>(p.out.data) + record.b * p.out.stride_b + record.h * p.out.stride_h +
                           row * p.out.stride_t;
    for (int d = 0; d < p.head_dim; ++d) g_row[d].bits = 0;
    if (p.lse) p.lse[record.b * p.lse_stride_b + record.h * p.lse_stride_h + row] = -infinity();
  }
}

// kPlain: scales_plainly().
template <bool kPlain>
__device__ __forceinline__ void consume(const QfAttnParams& p, const Items& items, const Shared& s, bool out_aligned) {
  // Derived afresh where they are used: registers are scarce.
  const auto consumer = [] { return fresh_tid() / kGroupThreads - 1; };
  const auto lane = [] { return fresh_tid() % 32; };
  const auto warp_row = [] { return (fresh_tid() - kGroupThreads) / 32 * 16; };  // from the block's first
  if (consumer() == kConsumers - 1) Turn(consumer()).pass();  // the first one's first turn
  Place<kRecords> item;   // whose q is multiplied next
  Place<kQStages> q_place;
  Place<kStages> place;   // of K; that of V is the one before, once its K is released
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
      fill_unserved_rows<Element>(p, record.seq, record.b, record.h, record.row_tile, items.row_tiles, 0, p.head_dim,
                                  true, {fresh_tid() - kGroupThreads, kConsumers * kGroupThreads});
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
      const Place<kStages> v = place.before();
      mbarrier_wait(whole(key0) ? &s.v_ring->full[v.stage()] : &s.v_checked[v.stage()], v.parity());
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
      key0 += kBlockN;
      wgmma_wait<1>();
      hold(S[0]);
      release_k();
      bool moved = softmax(key0);
      // The weights are never negative: this keeps them, and all that leads to them, before the wait that follows.
      moved = __any_sync(0xffffffffu, moved && !(rows.l[0] + rows.l[1] < 0.0f));
      if (moved) {
        wgmma_wait<0>();
        hold(O[0]);
        rescale_outputs(O, rescale);
      } else {
        wgmma_wait<0>();
        hold(O[0]);
      }
      if (lane() == 0) place.before().before().release(*s.v_ring);
      round_weights(key0);
    }
    const auto v = v_channels();
    wait_v(key0);
    start_pv(v);
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

template <bool kPlain>
__global__ void __launch_bounds__(qf::sm90_fwd::kThreads, 1)
    qf_sm90_fwd_kernel(const __grid_constant__ QfAttnParams p, const __grid_constant__ qf::sm90_fwd::Maps maps,
                       const __grid_constant__ qf::sm90_fwd::Items items, const bool out_aligned) {
  using namespace qf;
  using namespace qf::sm90_fwd;
  extern __shared__ char s_memory[];
  const Shared s(s_memory);
  const bool rows_fall = packed_rows_fall(p);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32;
    s.q_ring->init(kConsumerWarps);
    s.k_ring->init(kConsumerWarps);
    s.v_ring->init(kConsumerWarps);
    s.record_ring->init(kConsumerWarps + 1 + kInspectors / 32);
    for (int i = 0; i < kStages; ++i) mbarrier_init(&s.v_checked[i], kInspectors / 32);
    fence_mbarrier_init();
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  __syncthreads();  // the barriers are in place
  if (threadIdx.x < kGroupThreads) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, maps, s);
    if (threadIdx.x == 32) plan(p, items, s, rows_fall);
    if (threadIdx.x >= kGroupThreads - kInspectors) inspect(s, threadIdx.x - (kGroupThreads - kInspectors));
  } else {
    take_registers<kConsumerRegisters>();
    consume<kPlain>(p, items, s, out_aligned);
  }
}
