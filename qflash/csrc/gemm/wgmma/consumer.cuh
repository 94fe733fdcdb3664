// A consumer: the warpgroup that owns 64 rows of the block's tile. This file has every wait, MMA start and release in
// order; the epilogue is in output.cuh.
//
//   tensor cores   | step s of consumer 0 | step s of consumer 1 | s + 1 of 0 | s + 1 of 1 ...   x and w of each from
//   consumer 0     | start s + 1, wait for s, release its stage  | ...                           shared memory
//
// A consumer's epilogue overlaps the other's main loop. For this, consumer 1 starts kLag steps late, once: the two then
// reach their epilogues in turn.
#pragma once

#include "gemm/wgmma/output.cuh"
#include "gemm/wgmma/splits.cuh"
#include "ptx/barrier.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

template <class Config>
struct Consumer {
  using Sum = typename Config::Sum;
  using XTiles = typename Config::X::Tiles;
  using WTiles = typename Config::W::Tiles;

  const QfLinearParams& p;
  const Walk& walk;
  const PartialSums& partials;
  const SharedMemory<Config>& s;
  Output<Config> output;
  const int index = warp_uniform(int(threadIdx.x) / kWarpgroupThreads - 1);  // of this consumer
  const int lane = int(threadIdx.x) % 32;
  const XTiles x_tiles;
  const WTiles w_tiles;

  RingPosition<Config::kStages> at;
  RingPosition<1> terms_at;
  int to_lag;  // consumer 0: steps until the other starts
  Sum sums[Config::kSumTiles][4];

  __device__ __forceinline__ Consumer(const QfLinearParams& problem, const Walk& all_work,
                                      const PartialSums& partial_sums, const TensorMaps& maps,
                                      const SharedMemory<Config>& shared)
      : p(problem),
        walk(all_work),
        partials(partial_sums),
        s(shared),
        output(problem, maps, shared),
        x_tiles(shared.x + index * Config::X::kWarpgroupBytes),
        w_tiles(shared.w),
        to_lag(Config::kConsumers > 1 && index == 0 ? Config::kLag : 0) {}

  // Processes all work of the block.
  __device__ __forceinline__ void run() {
    if (kLags && index == 1) barrier_sync<kLagBarrier, 2 * kWarpgroupThreads>();
    const int rank = Config::kCluster > 1 ? int(cluster_rank()) : 0;
    walk.for_each<Config>([&](const Work& work) {
      multiply(work.steps);
      if (to_lag > 0) start_other();
      terms_at.wait_full(*s.terms);
      const int row0 = work.row0 + rank * Config::kRows;
      bool mine = row0 + output.warp * kWarpRows < p.m;  // there are rows, and this warp stores them
      if (mine && work.splits > 1)
        mine = add_splits<Config>(partials, walk, work, rank * Config::kConsumerWarps + output.warp, lane, sums);
      if (mine) write_out(row0, work.column0);
      terms_at.release(*s.terms);  // each lane arrives for what it read
      terms_at.advance();
    });
    output.finish();
  }

 private:
  static constexpr bool kLags = Config::kConsumers > 1 && Config::kLag > 0;
  static constexpr int kLagBarrier = 1;

  // Main loop: sums = x w of this consumer's rows, in `steps` steps. MMAs of one step run while the next is started.
  __device__ __forceinline__ void multiply(int steps) {
    if (steps == 0) clear();
    hold(sums);
    wgmma_fence();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const XTiles x = stage_of(x_tiles);
      const WTiles w = stage_of(w_tiles);
      at.wait_full(*s.steps);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Config::kProducts; ++i)
        Config::Product::template multiply<Config::kXAlongM, Config::kWAlongN>(sums, x.step(i), w.step(i),
                                                                               step > 0 || i > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the MMAs of the previous step
      if (step > 0) release(at.previous());
      if (to_lag > 0 && --to_lag == 0) start_other();
      at.advance();
    }
    wgmma_wait<0>();
    hold(sums);
    if (steps > 0) release(at.previous());
  }

  __device__ __forceinline__ void write_out(int row0, int column0) {
    if constexpr (Config::kIntegers) {
      output.template store<typename Config::Out>(row0, column0, sums);
    } else {
      if (!Config::kSumsAlone && p.out_dtype == QF_F32)
        output.template store<float>(row0, column0, sums);
      else
        output.template store<typename Config::Element>(row0, column0, sums);
    }
  }

  // Releases a stage, to all blocks that load into it.
  __device__ __forceinline__ void release(const RingPosition<Config::kStages>& done) const {
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) done.release(*s.steps);
    } else {
      if (lane < Config::kCluster) mbarrier_arrive_at(&s.steps->empty[done.stage()], uint32_t(lane));
    }
  }
  __device__ __forceinline__ void start_other() {
    to_lag = 0;
    if constexpr (kLags) barrier_arrive<kLagBarrier, 2 * kWarpgroupThreads>();
  }
  // Descriptors are warp-uniform, and the compiler should know it.
  template <class Tiles>
  __device__ __forceinline__ Tiles stage_of(const Tiles& tiles) const {
    Tiles tile = tiles.later(at.stage());
    tile.low = warp_uniform(tile.low);
    return tile;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < Config::kSumTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0;
  }
};

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
