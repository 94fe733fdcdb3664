// What consumers of either kernel of the backward pass do alike: a consumer is the warpgroup that owns 64 rows of the
// block's tile. What is waited for, started and released, and in which order, stands in consumer_keys.cuh (dK and dV)
// and consumer_queries.cuh (dQ).
#pragma once

#include "attn/wgmma/backward/shared_memory.cuh"
#include "attn/wgmma/softmax.cuh"
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
  using SummedColumns = AlongColumns<typename Config::ColumnTile>;  // as B of sums over columns
  using Scores = float[Config::kNTiles][4];
  using Fragments = uint32_t[Config::kColumnSteps][4];
  using Outputs = float[1][Config::kOTiles][4];

  const SharedMemory<Config>& s;
  const bool leads = lane_index() == 0;  // releases for its warp: one arrival each
  const RowOperand first_rows, second_rows;
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<1> rows_at;
  RingPosition<Config::kStages> at;
  bool holds = false;  // the stage before `at`, whose products are under way

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
    __syncwarp();  // every lane has seen them, should this consumer have met no column
    if (leads) rows_at.release(*s.row_ring);
    rows_at.advance();
  }
  __device__ __forceinline__ void wait_columns() const {
    at.wait_full(*s.column_ring);
    mbarrier_wait(&s.inspected[at.stage()], at.parity());
  }
  __device__ __forceinline__ void release_held() {
    if (holds && leads) at.previous().release(*s.column_ring);
    holds = false;
  }
  // Past tiles that this consumer's rows do not meet. Nothing is held meanwhile: the others may need its stage.
  __device__ __forceinline__ void skip(int tiles) {
    for (; tiles > 0; --tiles) {
      wait_columns();
      __syncwarp();  // every lane has seen them, before the next can take their place
      if (leads) at.release(*s.column_ring);
      at.advance();
    }
  }

  __device__ __forceinline__ float* own_scratch() const { return s.scratch + warp_row() / 16 * 2 * Config::kHeadDim; }

  // D = A B^T over all channels.
  __device__ static __forceinline__ void start_scores(Scores& D, const RowOperand& a, const ColumnOperand& b) {
    hold(D);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kChannelSteps; ++i)
      Wgmma<Element, Config::kBlockN>::multiply(D, a.step(i), b.step(i), i > 0);
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

  template <class Operand>
  __device__ __forceinline__ Operand stage_of(char* s_tiles) const {
    Operand x = Operand(s_tiles).later(at.stage());
    x.low = warp_uniform(x.low);  // descriptors are the same for the warp, and the compiler is to know it
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
