// A consumer of the dQ kernel: 64 queries, whose dQ stays in its registers over all keys.
//
// Tile n of keys, on the tensor cores and in this warpgroup:
//
//   tensor cores   | dQ(n-1)  S = Q K^T, dP = dO V^T     | the other consumer's           | dQ += dS K   | S(n+1) ...
//   this warpgroup | release n-1, wait S | P = exp, wait | dS = P (dP - delta), round     |
#pragma once

#include "attn/wgmma/backward/consumer.cuh"
#include "attn/wgmma/backward/inspect.cuh"
#include "attn/wgmma/backward/nonfinite.cuh"
#include "attn/wgmma/backward/rotate_back.cuh"
#include "attn/wgmma/backward/store.cuh"
#include "attn/wgmma/backward/weights.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Config>
struct QueryConsumer : ConsumerBase<Config> {
  using Base = ConsumerBase<Config>;
  using Base::at, Base::holds, Base::s;
  using typename Base::ColumnOperand, typename Base::SummedColumns, typename Base::Work;

  const QfAttnBwdParams& params;
  const QfAttnParams& p;
  const Weights<Config> weights;
  RowStatistics of;
  typename Base::Scores S, dP;  // S becomes P
  typename Base::Fragments dS;  // rounded, as A of the dQ MMA
  typename Base::Outputs dQ;

  __device__ __forceinline__ QueryConsumer(const QfAttnBwdParams& problem, const SharedMemory<Config>& shared)
      : Base(shared), params(problem), p(problem.fwd), weights(problem.fwd) {}

  // All work tiles of the block.
  __device__ __forceinline__ void run(int row_tiles, const Stores& aligned) {
    this->begin_alternating();
    for (;;) {
      const Work& work = this->wait_work();
      if (work.tiles < 0) return this->end_alternating();
      if (work.unserved) fill_unserved(p, params.dq, work, row_tiles);
      if (work.tiles > 0) {
        sum_over_keys(work);
        if (p.rope.cos) rotate_back(p.rope, work, dQ[0], this->own_scratch());
        store_outputs<Config>(params.dq, work, dQ, p.scale * Config::kUnshift, aligned.first, p.head_dim);
        if (unlikely(work.cleared)) add_nonfinite_keys<Config>(params, work);
      } else if (work.rows > 0) {
        store_zeros<Config>(params.dq, work, p.head_dim);
      }
      this->release_work();
    }
  }

 private:
  __device__ __forceinline__ void sum_over_keys(const Work& work) {
    const KeyRange own = work.own[consumer_index()];
    const int first = warp_uniform(own.begin), end = warp_uniform(own.end), tiles = warp_uniform(work.tiles);
    const KeyRange full = {warp_uniform(work.full.begin), warp_uniform(work.full.end)};
    const auto is_whole = [&](int column0) { return column0 >= full.begin && column0 + Config::kBlockN <= full.end; };
    const float* const g_delta = static_cast<const float*>(params.workspace);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Statistics row = statistics_of(p, g_delta, work, work.row_head,
                                           work.row0 + first_own_row<Config>() + lane_index() / 4 + 8 * h);
      of.minus_lse_of[h] = row.minus_lse, of.delta_of[h] = row.delta;
    }
    clear_outputs(dQ);
    this->rows_at.wait_full(*s.row_ring);
    this->template skip<true>(first);
    int column0 = work.columns.begin + first * Config::kBlockN;
    this->wait_to_issue();
#pragma unroll 1
    for (int n = first; n < end; ++n, column0 += Config::kBlockN) step(work, column0, is_whole(column0));
    this->let_other_issue();
    this->release_rows();  // S and dP of the last tile are complete
    wgmma_wait<0>();
    hold(dQ[0]);
    this->release_held();
    this->template skip<true>(tiles - end);
  }

  __device__ __forceinline__ void step(const Work& work, int column0, bool whole) {
    const auto [k, v, k_summed, _] = this->columns();

    this->wait_columns();
    this->start_scores(S, this->first_rows, k);    // S(n) = Q K^T
    this->start_scores(dP, this->second_rows, v);  // dP(n) = dO V^T
    this->let_other_issue();
    wgmma_wait<2>();  // dQ(n - 1)
    hold(dQ[0]);
    this->release_held();
    wgmma_wait<1>();  // S
    hold(S);
    weights.take(S, of);
    wgmma_wait<0>();  // dP
    hold(dP);
    typename Base::Fragments P;  // unused here
    weights.finish(S, dP, P, dS, of, work, column0, whole);
    this->wait_to_issue();
    this->start_sums(dQ, dS, k_summed);  // dQ += dS K
    holds = true;
    at.advance();
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
