// The consumers of the dK and dV kernel when one warpgroup lacks the registers for both (head_dim above 128): both have
// the same 64 keys. Consumer 0 computes S, P and dV, consumer 1 dP, dS and dK: two of the four MMAs each. P passes from
// one to the other through shared memory, rounded and in register order: each thread reads what the same thread of the
// other consumer wrote. It is double buffered (`exchange`), so that neither consumer waits for the other in every step.
//
//   consumer 0   | S^T = K Q^T, wait   | P = exp, round, write P | dV += P^T dO ...
//   consumer 1   | dP^T = V dO^T, read P, wait   | dS = P (dP - delta), round | dK += dS^T Q ...
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

// kValues: dV, else dK.
template <class Config, bool kValues>
struct SplitConsumer : ConsumerBase<Config> {
  using Base = ConsumerBase<Config>;
  using Base::at, Base::holds, Base::s;
  using typename Base::ColumnOperand, typename Base::SummedColumns, typename Base::Work;

  const QfAttnBwdParams& params;
  const QfAttnParams& p;
  const DsMemory& ds;
  const Weights<Config> weights;
  RingPosition<Config::kExchanges> exchange_at;
  typename Base::Scores S;      // or dP; [key][query], transposed
  typename Base::Fragments A;   // P, or dS, rounded
  typename Base::Outputs sums;  // dV, or dK

  __device__ __forceinline__ SplitConsumer(const QfAttnBwdParams& problem, const DsMemory& memory,
                                           const SharedMemory<Config>& shared)
      : Base(shared), params(problem), p(problem.fwd), ds(memory), weights(problem.fwd) {}

  // All work tiles of the block.
  __device__ __forceinline__ void run(int row_tiles, const Stores& aligned) {
    const QfTensor& result = kValues ? params.dv : params.dk;
    for (;;) {
      const Work& work = this->wait_work();
      if (work.tiles < 0) return;
      if (work.unserved) {  // by all consumers together, as are the zeros of rows that see nothing
        fill_unserved(p, params.dk, work, row_tiles);
        fill_unserved(p, params.dv, work, row_tiles);
      }
      if (work.tiles > 0) {
        sum_over_queries(work);
        if (!kValues && p.rope.cos) rotate_back(p.rope, work, sums[0], this->own_scratch());
        store_outputs<Config>(result, work, sums, (kValues ? 1.0f : p.scale) * Config::kUnshift,
                              kValues ? aligned.second : aligned.first, p.head_dim);
        if (unlikely(work.cleared)) add_nonfinite_queries<Config, !kValues, kValues>(params, work);
      } else if (work.rows > 0) {
        store_zeros<Config>(params.dk, work, p.head_dim);
        store_zeros<Config>(params.dv, work, p.head_dim);
      }
      this->release_work();
    }
  }

 private:
  __device__ __forceinline__ void sum_over_queries(const Work& work) {
    const KeyRange own = work.own[0];
    const int first = warp_uniform(own.begin), end = warp_uniform(own.end), tiles = warp_uniform(work.tiles);
    const KeyRange full = {warp_uniform(work.full.begin), warp_uniform(work.full.end)};
    const auto is_whole = [&](int column0) { return column0 >= full.begin && column0 + Config::kBlockN <= full.end; };
    clear_outputs(sums);
    this->rows_at.wait_full(*s.row_ring);
#pragma unroll 1
    for (int head = warp_uniform(work.heads); head > 0; --head) {
      this->skip(first);
      int column0 = work.columns.begin + first * Config::kBlockN;
#pragma unroll 1
      for (int n = first; n < end; ++n, column0 += Config::kBlockN) step(work, head, column0, is_whole(column0));
      if (head == 1) this->release_rows();  // S, or dP, of the last tile is complete
      finish_sums();
      this->skip(tiles - end);
    }
  }

  // heads_left: remaining query heads of the group, including this one.
  __device__ __forceinline__ void step(const Work& work, int heads_left, int column0, bool whole) {
    const auto columns = this->columns();
    const auto scored = kValues ? columns.first : columns.second;
    const auto summed = kValues ? columns.second_summed : columns.first_summed;
    const int statistics = at.stage() * Config::kBlockN + lane_index() % 4 * 2;
    ColumnStatistics<Config::kNTiles> of(s.minus_lse + statistics, s.minus_delta + statistics);

    this->wait_columns();
    finish_sums();  // of tile n - 1
    if constexpr (kValues) {
      this->start_scores(S, this->first_rows, scored);  // S^T(n) = K Q^T
      of.fetch();
      wgmma_wait<0>();
      hold(S);
      typename Base::Fragments sloped;
      weights.take_alone(S, A, sloped, of, work, column0, whole);
      leave(sloped);
    } else {
      of.preset(S);
      this->template start_scores<true>(S, this->second_rows, scored);  // dP^T(n) = V dO^T - delta
      typename Base::Fragments P;
      take(P);
      wgmma_wait<0>();
      hold(S);
      weights.gradients_alone(S, P, A, work, column0, whole);
      store_ds<Config>(ds, work, heads_left, column0, A);
    }
    this->start_sums(sums, A, summed);  // dV += P^T dO, or dK += dS^T Q
    holds = true;
    at.advance();
  }

  __device__ __forceinline__ void finish_sums() {
    wgmma_wait<0>();
    hold(sums[0]);
    this->release_held();
  }

  // This thread's words of the exchange stage; those of its twin in the other consumer are the same.
  __device__ __forceinline__ Word4* own_words() const {
    return s.exchange + exchange_at.stage() * Config::kExchangeBytes / 16 + warp_row() % kWarpgroupRows / 16 * 32 * 4 +
           lane_index();
  }
  __device__ __forceinline__ void leave(const typename Base::Fragments& words) {
    exchange_at.wait_empty(*s.exchange_ring);
    Word4* const s_own = own_words();
#pragma unroll
    for (int i = 0; i < Config::kColumnSteps; ++i)
      s_own[32 * i] = Word4{{words[i][0], words[i][1], words[i][2], words[i][3]}};
    exchange_at.fill(*s.exchange_ring);  // each lane arrives for what it wrote
    exchange_at.advance();
  }
  __device__ __forceinline__ void take(typename Base::Fragments& words) {
    exchange_at.wait_full(*s.exchange_ring);
    const Word4* const s_own = own_words();
#pragma unroll
    for (int i = 0; i < Config::kColumnSteps; ++i) {
      const Word4 x = s_own[32 * i];
#pragma unroll
      for (int word = 0; word < 4; ++word) words[i][word] = x.word[word];
    }
    exchange_at.release(*s.exchange_ring);
    exchange_at.advance();
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
