// A consumer of the dQ kernel that reads stored dS: 64 queries, whose dQ stays in its registers over all keys. Both
// operands come from shared memory, and a step is one matrix product.
#pragma once

#include "attn/wgmma/backward/consumer.cuh"
#include "attn/wgmma/backward/nonfinite.cuh"
#include "attn/wgmma/backward/rotate_back.cuh"
#include "attn/wgmma/backward/store.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Config>
struct DsConsumer : ConsumerBase<Config> {
  using Base = ConsumerBase<Config>;
  using Base::at, Base::holds, Base::s;
  using typename Base::Element, typename Base::SummedColumns, typename Base::Work;
  using DsOperand = AlongColumns<Panels<kDsTile, kDsTile>>;  // [key][query]: as A, transposed

  const QfAttnBwdParams& params;
  const QfAttnParams& p;
  typename Base::Outputs dQ;

  __device__ __forceinline__ DsConsumer(const QfAttnBwdParams& problem, const SharedMemory<Config>& shared)
      : Base(shared), params(problem), p(problem.fwd) {}

  // All work tiles of the block.
  __device__ __forceinline__ void run(int row_tiles, const Stores& aligned) {
    for (;;) {
      const Work& work = this->wait_work();
      if (work.tiles < 0) return;
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
    clear_outputs(dQ);
    this->skip(first);
#pragma unroll 1
    for (int n = first; n < end; ++n) step();
    wgmma_wait<0>();
    hold(dQ[0]);
    this->release_held();
    this->skip(tiles - end);
  }

  __device__ __forceinline__ void step() {
    const auto k_summed = this->columns().first_summed;
    DsOperand dS(s.second_columns + at.stage() * Config::kSecondBytes + consumer_index() * kDsTileBytes);
    dS.low = warp_uniform(dS.low);

    this->wait_columns();
    hold(dQ[0]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kColumnSteps; ++i)
      Wgmma<Element, Config::kHeadDim>::template multiply<true, true>(dQ[0], dS.step(i), k_summed.step(i), true);
    wgmma_commit();   // dQ += dS K
    wgmma_wait<1>();  // dQ(n - 1)
    this->release_held();
    holds = true;
    at.advance();
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
