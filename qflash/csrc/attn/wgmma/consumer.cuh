// A consumer: the warpgroup that owns 64 rows of the block's tile. This file has every wait, MMA start and release in
// order; what is computed in between belongs to the kernel's policies, which use no barriers:
//
//   Scores    S = Q K^T and from S to weights      scores_16bit.cuh | scores_int8.cuh
//   Weights   P as it is multiplied, O += P V      weights_16bit.cuh | weights_e4m3.cuh
//   Rare      what a tile seldom needs             rare_recover.cuh | rare_int8.cuh
//
// Tile n of a work tile, on the tensor cores and in this warpgroup:
//
//   tensor cores   | S(n+1) = Q K(n+1)^T | O += P(n) V(n)          | the other consumer's MMAs        | S(n+2) ...
//   this warpgroup | wait                | weights of S(n+1)  wait | release V(n), K(n+1); round into P(n+1) |
//
// hold() keeps the compiler from touching accumulators before the point where it stands.
#pragma once

#include "attn/wgmma/output.cuh"
#include "attn/wgmma/shared_memory.cuh"
#include "ptx/uniform.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace wgmma {

template <class Kernel>
struct Consumer {
  using Config = typename Kernel::Config;
  using Work = WorkTile<Config>;
  using Scores = typename Kernel::Scores;
  using Weights = typename Kernel::Weights;
  using Rare = typename Kernel::Rare;
  using QTiles = AlongRows<typename Config::QTile>;
  using KTiles = AlongRows<typename Config::KTile>;
  using VTiles = typename Weights::Values;

  const QfAttnParams& p;
  const TileSchedule& schedule;
  const SharedMemory<Config>& s;
  const bool leads = lane_index() == 0;  // releases for its warp: one arrival each
  const QTiles q_tiles_kept;
  const KTiles k_tiles;
  const VTiles v_tiles;

  RingPosition<Config::kWorkTiles> work_at;  // the work tile whose q is multiplied next
  RingPosition<Config::kQStages> q_at;
  RingPosition<Config::kStages> k_at;          // V is one tile behind: v_at()
  RingPosition<Config::kStages> inspected_at;  // among the tiles of V that are inspected
  bool k_full, v_full;                         // K of the next tile, and the next V, as poll() saw them

  Scores scores;
  Weights weights;
  Rare rare;
  RowState rows;
  float O[1][Config::kOTiles][4];

  // The tile of keys last turned into weights. step() moves to the next one after it has started the MMA with its V.
  struct KeyTile {
    int key0;
    bool whole;  // every row of the block sees all of it: no masking, and no inspection of its V
  };

  __device__ __forceinline__ Consumer(const QfAttnParams& problem, const typename Kernel::Params& params,
                                      const TileSchedule& tile_schedule, const SharedMemory<Config>& shared)
      : p(problem),
        schedule(tile_schedule),
        s(shared),
        q_tiles_kept(own_q_tiles()),
        k_tiles(s.k),
        v_tiles(s.v),
        scores(params, s),
        weights(params, s),
        rare(params, s) {}

  // All work tiles of the block.
  __device__ __forceinline__ void run(bool out_aligned) {
    while (find_work()) {
      start_work(true);
#pragma unroll 1
      for (bool more = true; more;) more = attend(out_aligned);
      wgmma_wait<0>();
    }
  }

 private:
  // One work tile, whose S(0) has been started. Returns whether that of the next one has been, too.
  __device__ __forceinline__ bool attend(bool out_aligned) {
    const RingPosition<Config::kWorkTiles> current = work_at;
    const Work& work = s.work[current.stage()];
    const KeyRange whole_keys = work.full;  // in registers, if there are enough
    const auto is_whole = [&](int key0) {
      return Config::kConsumers > 2 ? work.whole(key0)
                                    : key0 >= whole_keys.begin && key0 + Config::kBlockN <= whole_keys.end;
    };
    KeyTile tile = {work.keys.begin, is_whole(work.keys.begin)};
    const int own_tiles = warp_uniform(work.own_tiles[consumer_index()]);  // at least one
    begin(work);
    wgmma_wait<0>();  // S(0)
    scores.hold_sums();
    scores.weigh_first(work, tile.key0, tile.whole, k_at.stage(), rows, weights);
    weights.round(scores.S);  // P(0)
    weights.add_first_sums(rows, scores.S);
    poll();
    if (Scores::kReadsKeys) __syncwarp();  // every lane has read K, where it did
    release_k();
    add_remainders(tile);
    const QTiles q = stage_of(q_tiles(), q_at.stage());
#pragma unroll 1
    for (int left = own_tiles - 1; left > 0; --left) {
      int steady = 0;  // number of steady tiles; the same for all warps of a consumer
      if constexpr (Scores::kSteadyTiles) {
        const int whole_tiles = tile.whole ? (whole_keys.end - tile.key0) / Config::kBlockN - 1 : 0;
        steady = warp_uniform(scores.steady_tiles(left, whole_tiles, weights));
      }
      if (steady > 0)
        steady_steps(q, tile, steady, left);
      else
        step(work, q, tile, is_whole);
      // Rare work may recompute scores from K, so K is released after it; the last instructions of that work are
      // warp-synchronous.
      if (unlikely(rare.due(scores, weights, rows, left)))
        rare.run(work, tile.key0, tile.whole, q_at.stage(), k_at.stage(), left, scores, weights, rows, O);
      release_tile();
      if (Rare::kRoundsLast) weights.round(scores.S);  // P(n + 1), from registers only: it need not delay the release
      add_remainders(tile);
    }
    return finish_work(work, current, tile, is_whole, out_aligned);
  }

  // From tile n to tile n + 1, for any kind of tile.
  template <class IsWhole>
  __device__ __forceinline__ void step(const Work& work, const QTiles& q, KeyTile& tile, IsWhole is_whole) {
    scores.template fetch<false>();
    const KTiles k = stage_of(k_tiles, k_at.stage());
    const VTiles v = stage_of(v_tiles, v_at().stage());
    wgmma_copy(0);  // the emulator checks that all warps go through the same copy of this code
    if (!k_full) k_at.wait_full(*s.k_ring);
    scores.start(q, k);  // S(n + 1) = Q K(n + 1)^T
    if (!v_full) v_at().wait_full(*s.v_ring);
    wait_inspected(tile);
    weights.start_product(O, v);  // O += P(n) V(n)
    wgmma_copy(0);
    if (!tile.whole) inspected_at.advance();
    tile.key0 += Config::kBlockN;
    tile.whole = is_whole(tile.key0);
    wgmma_wait<1>();  // S(n + 1)
    scores.hold_sums();
    scores.weigh(work, tile.key0, tile.whole, k_at.stage(), rows, weights);
    poll();
    wgmma_wait<0>();  // O
    hold_outputs();
    weights.finish_product();
    if (!Rare::kRoundsLast) weights.round(scores.S);  // P(n + 1)
  }

  // Whole tiles that follow a whole tile and need nothing else have a loop of their own, with no branches except for
  // stages that are not full yet. The last of them is left for the caller to release. All warps of a consumer start
  // MMAs together, and from the same place in the code: a warp that leaves early, because something rare is due in its
  // rows, is back for the next tile.
  __device__ __forceinline__ void steady_steps(const QTiles& q, KeyTile& tile, int steady, int& left) {
    if constexpr (Scores::kSteadyTiles) {
#pragma unroll 1
      for (;; --left) {
        scores.template fetch<true>();
        const KTiles k = stage_of(k_tiles, k_at.stage());
        const VTiles v = stage_of(v_tiles, v_at().stage());
        wgmma_copy(1);
        if (!k_full) k_at.wait_full(*s.k_ring);
        scores.start(q, k);  // S(n + 1) = Q K(n + 1)^T
        if (!v_full) v_at().wait_full(*s.v_ring);
        weights.start_product(O, v);  // O += P(n) V(n)
        wgmma_copy(0);
        tile.key0 += Config::kBlockN;
        wgmma_wait<1>();  // S(n + 1)
        scores.hold_sums();
        auto half = scores.weigh_first_half(rows, weights);
        wgmma_wait<0>();  // O
        hold_outputs();
        weights.finish_product();
        scores.weigh_second_half(half, rows, weights);  // and P(n + 1)
        const bool large = __any_sync(0xffffffffu, weights.too_large(rows));
        poll();
        if (large || --steady == 0) break;
        release_tile();
      }
    }
  }

  // Finishes a work tile: its last MMA, and its epilogue, which overlaps S(0) of the next work tile.
  template <class IsWhole>
  __device__ __forceinline__ bool finish_work(const Work& work, RingPosition<Config::kWorkTiles> current, KeyTile& tile,
                                              IsWhole is_whole, bool out_aligned) {
    const RingPosition<Config::kStages> last_v = v_at();
    last_v.wait_full(*s.v_ring);
    wait_inspected(tile);
    weights.start_product(O, stage_of(v_tiles, last_v.stage()));  // O += P V, of the last tile
    weights.prefetch_output(work);
    if (!tile.whole) inspected_at.advance();
    const auto others = [&] { return Config::kSkipsTiles ? work.tiles - work.own_tiles[consumer_index()] : 0; };
    if (others() > 0) {  // tiles that only other consumers see
      wgmma_wait<0>();
      hold_outputs();
      if (leads) last_v.release(*s.v_ring);  // one of them may need this stage: holding it would deadlock
      for (int n = others(); n > 0; --n) {
        tile.key0 += Config::kBlockN;
        k_at.wait_full(*s.k_ring);
        k_at.wait_full(*s.v_ring);
        __syncwarp();  // every lane has seen them, before the next can overwrite them
        if (leads) k_at.release(*s.k_ring);
        if (leads) k_at.release(*s.v_ring);
        k_at.advance();
        if (!is_whole(tile.key0)) inspected_at.advance();  // a consumer that sees it waits before it releases V
      }
    }
    const RingPosition<Config::kQStages> q_done = q_at;
    q_at.advance();
    work_at.advance();
    bool more = false;
    if (Config::kQStages > 1) {
      // S(0) of the next work tile runs while this one is stored. If find_work() has to handle that one first, an MMA
      // on arbitrary data is started anyway and its result ignored: the wait below counts on it.
      const Work& next = wait_work();
      more = next.tiles > 0 && !next.unserved;
      start_work(more);
      wgmma_wait<1>();  // O
    } else {
      if (leads) q_done.release(*s.q_ring);
      wgmma_wait<0>();  // O
    }
    hold_outputs();
    weights.finish_product();
    if (leads && others() == 0) last_v.release(*s.v_ring);
    Kernel::store(p, s, work, q_done.stage(), out_aligned, scores, weights, rare, rows, O);
    __syncwarp();  // every lane has read the work tile, and its rows
    if (leads) current.release(*s.work_ring);
    if (Config::kQStages > 1 && leads) q_done.release(*s.q_ring);
    return more;
  }

  __device__ __forceinline__ const Work& wait_work() {
    work_at.wait_full(*s.work_ring);
    return s.work[work_at.stage()];
  }
  // Advances to the next work tile that has keys (tiles > 0), past those that have none (tiles == 0), whose rows, if
  // they exist, are zeros, and for which nothing was loaded. Also fills rows that no sequence owns (unserved). False:
  // there are no more work tiles (tiles < 0).
  __device__ __forceinline__ bool find_work() {
    for (;; work_at.advance()) {
      const Work& work = wait_work();
      if (work.unserved)
        fill_unserved_rows<typename Config::Element, AllConsumers<Config>>(
            p, work.seq, work.b, work.h, work.row_tile, work.unserved_shares(schedule.rows), 0, p.head_dim, true);
      if (work.tiles != 0) return work.tiles > 0;
      if (work.exists()) store_empty_rows(p, work);
      __syncwarp();  // every lane has read the work tile
      if (leads) work_at.release(*s.work_ring);
    }
  }
  // Starts S(0) of the work tile at work_at. Not ready: on arbitrary data, and the result is ignored.
  __device__ __forceinline__ void start_work(bool ready) {
    const QTiles q = stage_of(q_tiles(), q_at.stage());
    const KTiles k = stage_of(k_tiles, k_at.stage());
    if (ready) {
      scores.prefetch(work_now());
      weights.prefetch(work_now());
      q_at.wait_full(*s.q_ring);
      k_at.wait_full(*s.k_ring);
    }
    scores.start(q, k);
  }
  __device__ __forceinline__ void begin(const Work& work) {
    weights.begin(work);
    scores.begin(work, weights);
    clear_outputs(O);
    rows.begin();
    rare.begin();
  }

  __device__ __forceinline__ const Work& work_now() const { return s.work[work_at.stage()]; }
  __device__ __forceinline__ RingPosition<Config::kStages> v_at() const { return k_at.previous(); }
  // This consumer's rows of q. Recomputed for each work tile if registers are scarce.
  __device__ __forceinline__ QTiles own_q_tiles() const {
    return QTiles(s.q + consumer_index() * kWarpgroupRows * Config::QTile::kRowBytes);
  }
  __device__ __forceinline__ QTiles q_tiles() const { return Config::kConsumers > 2 ? own_q_tiles() : q_tiles_kept; }
  // Descriptors are warp-uniform, and the compiler should know it.
  template <class Tiles>
  __device__ static __forceinline__ Tiles stage_of(const Tiles& tiles, int stage) {
    Tiles x = tiles.later(stage);
    x.low = warp_uniform(x.low);
    return x;
  }
  __device__ __forceinline__ void wait_inspected(const KeyTile& tile) const {
    if (!tile.whole) mbarrier_wait(&s.v_inspected[inspected_at.stage()], inspected_at.parity());
  }
  // Have the next tiles arrived? Tested long before the wait, to hide the latency of the test.
  __device__ __forceinline__ void poll() {
    k_full = k_at.next().is_full(*s.k_ring);
    v_full = k_at.is_full(*s.v_ring);
  }
  __device__ __forceinline__ void hold_outputs() {
    hold(O[0]);
    weights.hold_sums();
  }
  __device__ __forceinline__ void release_k() {
    if (leads) k_at.release(*s.k_ring);
    k_at.advance();
  }
  // V(n) and K(n + 1) have been read.
  __device__ __forceinline__ void release_tile() {
    weights.add_sums(rows);
    if (Scores::kReadsKeys) __syncwarp();  // every lane has read K, where it did
    if (leads) v_at().release(*s.v_ring);
    release_k();
  }
  // In rows that see few keys: adds what rounding took off the weights of the tile just weighed, whose V is at v_at().
  __device__ __forceinline__ void add_remainders(const KeyTile& tile) {
    if constexpr (Weights::kRemainders) {
      if (!weights.sees_few) return;
      v_at().wait_full(*s.v_ring);
      wait_inspected(tile);
      const VTiles v = v_tiles.later(v_at().stage());
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 16; ++i) {
        uint32_t R[4];
        weights.start_remainder(O, scores.S, v, i, R);
        wgmma_wait<0>();
        hold(O[0]);
      }
    }
  }
};

}  // namespace wgmma
}  // namespace qf
