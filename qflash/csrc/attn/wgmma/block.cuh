// One block: barriers, and who does what.
#pragma once

#include "attn/wgmma/consumer.cuh"
#include "attn/wgmma/producer.cuh"
#include "ptx/setmaxnreg.cuh"

namespace qf {
namespace sm90 {

// p: the problem, as everybody knows it; params: what Math wants to know; look: inspect()'s.
template <class Math, class Look>
__device__ __forceinline__ void work(const QfAttnParams& p, const typename Math::Params& params, const Maps& maps,
                                     const Items& items, Look look, bool out_aligned, float4* s_memory) {
  const Shared s(reinterpret_cast<char*>(s_memory));
  const bool rows_fall = packed_rows_fall(p);
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32, kInspectorWarps = kInspectors / 32;
    s.q_ring->init(kConsumerWarps);
    s.k_ring->init(kConsumerWarps);
    s.v_ring->init(kConsumerWarps + kInspectorWarps);
    s.record_ring->init(kConsumerWarps + 1 + kInspectorWarps);
    for (int i = 0; i < kStages; ++i) mbarrier_init(&s.v_checked[i], kInspectorWarps);
    mbarrier_init(s.wanted, 1);
    fence_mbarrier_init();  // the barriers, to the copy engine
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  Math::set_up(s);
  __syncthreads();  // the barriers are in place
  if (threadIdx.x < kGroupThreads) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, items, maps, s);
    if (threadIdx.x == 32) plan<Math>(p, params, items, s, rows_fall);
    if (threadIdx.x >= kGroupThreads - kInspectors) inspect(s, threadIdx.x - (kGroupThreads - kInspectors), look);
  } else {
    take_registers<kConsumerRegisters>();
    consume<Math>(p, params, items, s, out_aligned);
  }
}

}  // namespace sm90
}  // namespace qf
