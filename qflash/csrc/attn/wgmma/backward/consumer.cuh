// What the consumers of both backward kernels share. A consumer is the warpgroup that owns 64 rows of the block's tile.
// The order of waits, issued MMAs and releases is in consumer_keys.cuh (dK and dV) and consumer_queries.cuh (dQ).
#pragma once

#include "attn/wgmma/backward/shared_memory.cuh"
#include "attn/wgmma/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/uniform.cuh"
#include "ptx/wgmma.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Config>
struct ConsumerBase {
  using Element = typename Config::Element;
  using Work = WorkTile<Config>;
  using RowOperand = AlongRows<typename Config::RowTile>;           // as A of S and dP
  using ColumnOperand = AlongRows<typename Config::ColumnTile>;     // as B of S and dP
  using SummedColumns = AlongColumns<typename Config::ColumnTile>;  // as B of the gradient MMAs, summed over columns
  using Scores = float[Config::kNTiles][4];
  using Fragments = uint32_t[Config::kColumnSteps][4];
  using Outputs = float[1][Config::kOTiles][4];

  const SharedMemory<Config>& s;
  const int consumer = warp_uniform(consumer_index());
  const bool leads = lane_index() == 0;  // releases for its warp: one arrival each
  const RowOperand first_rows, second_rows;
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<1> rows_at;
  RingPosition<Config::kStages> at;
  bool holds = false;  // the stage before `at` is not released yet: its MMAs are in flight

  __device__ __forceinline__ explicit ConsumerBase(const SharedMemory<Config>& shared)
      : s(shared), first_rows(own_rows(shared.first_rows)), second_rows(own_rows(shared.second_rows)) {}

  __device__ __forceinline__ const Work& wait_work() const {
    work_at.wait_full(*s.work_ring);
    return s.work[work_at.stage()];
  }
  __device__ __forceinline__ void release_work() {
    __syncwarp();  // every lane has read the work tile
    if (leads) work_at.release(*s.work_ring);
    work_at.advance();
  }
  __device__ __forceinline__ void release_rows() {
    __syncwarp();  // every lane has seen them, even if this consumer sees no column
    if (leads) rows_at.release(*s.row_ring);
    rows_at.advance();
  }
  __device__ __forceinline__ void wait_columns() const {
    at.wait_full(*s.column_ring);
    mbarrier_wait(&s.inspected[at.stage()], at.parity());
  }
  __device__ __forceinline__ void release_held() {
    __syncwarp();  // every lane has read lse and delta
    if (holds && leads) at.previous().release(*s.column_ring);
    holds = false;
  }
  // Consumers take turns at issuing MMAs: the gradients of one tile and the scores of the next. If both issued theirs
  // at once, the tensor cores would interleave the two and then idle while both consumers compute weights. Consumer 1
  // passes the turn to consumer 0 before anything else, and consumer 0 takes it once more at the end.
  __device__ __forceinline__ void wait_to_issue() const {
    if constexpr (Config::kAlternates) {
      if (consumer == 0)
        barrier_sync<1, 2 * kWarpgroupThreads>();
      else
        barrier_sync<2, 2 * kWarpgroupThreads>();
    }
  }
  __device__ __forceinline__ void let_other_issue() const {
    if constexpr (Config::kAlternates) {
      if (consumer == 0)
        barrier_arrive<2, 2 * kWarpgroupThreads>();
      else
        barrier_arrive<1, 2 * kWarpgroupThreads>();
    }
  }
  __device__ __forceinline__ void begin_alternating() const {
    if (consumer == 1) let_other_issue();
  }
  __device__ __forceinline__ void end_alternating() const {
    if (consumer == 0) wait_to_issue();
  }

  // Skips tiles that this consumer's rows do not see. No stage is held meanwhile: the other consumers may need it.
  // kAlternating: also takes and passes a turn per tile, because the other consumer waits for it.
  template <bool kAlternating = false>
  __device__ __forceinline__ void skip(int tiles) {
    for (; tiles > 0; --tiles) {
      wait_columns();
      __syncwarp();  // every lane has seen them, before the next can overwrite them
      if (leads) at.release(*s.column_ring);
      at.advance();
      if constexpr (kAlternating) wait_to_issue(), let_other_issue();
    }
  }

  __device__ __forceinline__ float* own_scratch() const { return s.scratch + warp_row() / 16 * 2 * Config::kHeadDim; }

  // D = A B^T over all channels. kAdds: D += A B^T.
  template <bool kAdds = false>
  __device__ static __forceinline__ void start_scores(Scores& D, const RowOperand& a, const ColumnOperand& b) {
    hold(D);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kChannelSteps; ++i)
      Wgmma<Element, Config::kBlockN>::multiply(D, a.step(i), b.step(i), kAdds || i > 0);
    wgmma_commit();
  }
  // D += A B over the columns of a tile, A from registers.
  __device__ static __forceinline__ void start_sums(Outputs& D, const Fragments& A, const SummedColumns& b) {
    hold(D[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kColumnSteps; ++i)
      Wgmma<Element, Config::kHeadDim>::template multiply<true>(D[0], A[i], b.step(i));
    wgmma_commit();
  }

  // The stage's columns as operands. Descriptors are warp-uniform, and the compiler should know it: one word is made
  // uniform explicitly, and the others differ from it by constants.
  struct Columns {
    ColumnOperand first, second;
    SummedColumns first_summed, second_summed;
  };
  __device__ __forceinline__ Columns columns() const {
    constexpr uint32_t kSecond = Config::kStages * Config::ColumnTile::kBytes >> 4;
    Columns x = {ColumnOperand(s.first_columns), ColumnOperand(s.first_columns), SummedColumns(s.first_columns),
                 SummedColumns(s.first_columns)};
    const uint32_t summed = x.first_summed.low - x.first.low;
    x.first.low = warp_uniform(x.first.later(at.stage()).low);
    x.second.low = x.first.low + kSecond;
    x.first_summed.low = x.first.low + summed;
    x.second_summed.low = x.second.low + summed;
    return x;
  }

 private:
  __device__ static __forceinline__ RowOperand own_rows(const char* s_rows) {
    RowOperand x(s_rows + consumer_index() * kWarpgroupRows % Config::kBlockM * Config::RowTile::kRowBytes);
    x.low = warp_uniform(x.low);
    return x;
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
