// A consumer of the dK and dV kernel: 64 keys, whose dK and dV stay in its registers over all queries of their group.
//
// Tile n of queries, on the tensor cores and in this warpgroup:
//
//   tensor cores   | dK(n-1) | S^T = K Q^T | dP^T = V dO^T | the other consumer's  | dV(n) | dK(n) | S^T(n+1) | dP^T ..
//   this warpgroup | wait; release n-1     | P = exp       | dS = P dP, round      | its turn: issues these four ...
//
// The four MMAs issued in one turn run back to back while the other consumer computes weights. dS is also written to
// memory if dQ is computed from it (store_ds.cuh).
#pragma once

#include "attn/wgmma/backward/consumer.cuh"
#include "attn/wgmma/backward/nonfinite.cuh"
#include "attn/wgmma/backward/rotate_back.cuh"
#include "attn/wgmma/backward/store.cuh"
#include "attn/wgmma/backward/store_ds.cuh"
#include "attn/wgmma/backward/weights.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Config>
struct KeyConsumer : ConsumerBase<Config> {
  using Base = ConsumerBase<Config>;
  using Base::at, Base::holds, Base::s;
  using typename Base::ColumnOperand, typename Base::SummedColumns, typename Base::Work;

  static constexpr bool kWide = Config::kBlockN > 64;  // S and dP take more registers than dK and dV

  const QfAttnBwdParams& params;
  const QfAttnParams& p;
  const DsMemory& ds;
  const Weights<Config> weights;
  typename Base::Scores S, dP;     // [key][query], transposed: S becomes P
  typename Base::Fragments P, dS;  // rounded, as A of the gradient MMAs
  typename Base::Outputs dK, dV;

  __device__ __forceinline__ KeyConsumer(const QfAttnBwdParams& problem, const DsMemory& memory,
                                         const SharedMemory<Config>& shared)
      : Base(shared), params(problem), p(problem.fwd), ds(memory), weights(problem.fwd) {}

  // All work tiles of the block.
  __device__ __forceinline__ void run(int row_tiles, const Stores& aligned) {
    this->begin_alternating();
    for (;;) {
      const Work& work = this->wait_work();
      if (work.tiles < 0) return this->end_alternating();
      if (work.unserved) {
        fill_unserved(p, params.dk, work, row_tiles);
        fill_unserved(p, params.dv, work, row_tiles);
      }
      if (work.tiles > 0) {
        sum_over_queries(work);
        store_outputs<Config>(params.dv, work, dV, Config::kUnshift, aligned.second, p.head_dim);
        if (p.rope.cos) rotate_back(p.rope, work, dK[0], this->own_scratch());
        store_outputs<Config>(params.dk, work, dK, p.scale * Config::kUnshift, aligned.first, p.head_dim);
        if (unlikely(work.cleared)) add_nonfinite_queries<Config>(params, work);
      } else if (work.rows > 0) {
        store_zeros<Config>(params.dk, work, p.head_dim);
        store_zeros<Config>(params.dv, work, p.head_dim);
      }
      this->release_work();
    }
  }

 private:
  __device__ __forceinline__ void sum_over_queries(const Work& work) {
    const KeyRange& own = work.own[consumer_index()];
    const KeyRange full = {warp_uniform(work.full.begin), warp_uniform(work.full.end)};
    const auto is_whole = [&](int column0) { return column0 >= full.begin && column0 + Config::kBlockN <= full.end; };
    clear_outputs(dK);
    clear_outputs(dV);
    this->rows_at.wait_full(*s.row_ring);
#pragma unroll 1
    for (int head = warp_uniform(work.heads); head > 0; --head) {
      this->template skip<true>(warp_uniform(own.begin));
      const int begin = work.columns.begin, end = warp_uniform(begin + own.end * Config::kBlockN);
      int column0 = warp_uniform(begin + own.begin * Config::kBlockN);
      this->wait_to_issue();
#pragma unroll 1
      for (; column0 < end; column0 += Config::kBlockN) step(work, head, column0, is_whole(column0));
      this->let_other_issue();
      if (head == 1) this->release_rows();  // S and dP of the last tile are complete
      finish_sums();
      this->template skip<true>(warp_uniform(work.tiles - own.end));
    }
  }

  // heads_left: remaining query heads of the group, including this one.
  __device__ __forceinline__ void step(const Work& work, int heads_left, int column0, bool whole) {
    const auto [q, dout, q_summed, dout_summed] = this->columns();
    const int statistics = at.stage() * Config::kBlockN + lane_index() % 4 * 2;
    ColumnStatistics<Config::kNTiles> of(s.minus_lse + statistics, s.minus_delta + statistics);

    this->wait_columns();
    if constexpr (kWide) {
      finish_sums();  // of tile n - 1: its fragments free registers for S and dP
    } else {
      wgmma_wait<1>();  // dV(n - 1): the registers of its P are free
      hold(dV[0]);
    }
    this->start_scores(S, this->first_rows, q);  // S^T(n) = K Q^T
    of.preset(dP);
    this->template start_scores<true>(dP, this->second_rows, dout);  // dP^T(n) = V dO^T - delta
    this->let_other_issue();
    if constexpr (!kWide) {
      wgmma_wait<2>();  // dK(n - 1)
      hold(dK[0]);
      this->release_held();
    }
    of.fetch();
    wgmma_wait<1>();  // S
    hold(S);
    weights.take(S, of);
    wgmma_wait<0>();  // dP
    hold(dP);
    weights.finish(S, dP, P, dS, of, work, column0, whole);
    if constexpr (Config::kStoresDs) store_ds<Config>(ds, work, heads_left, column0, dS);
    this->wait_to_issue();
    this->start_sums(dV, P, dout_summed);  // dV += P^T dO
    this->start_sums(dK, dS, q_summed);    // dK += dS^T Q
    holds = true;
    at.advance();
  }

  __device__ __forceinline__ void finish_sums() {
    wgmma_wait<0>();
    hold(dK[0]), hold(dV[0]);
    this->release_held();
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
