// One block and its warp roles.
#pragma once

#include "gemm/wgmma/consumer.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/names.cuh"
#include "ptx/setmaxnreg.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

// Synchronizes all threads of all blocks of the cluster.
template <class Config>
__device__ __forceinline__ void meet() {
  if constexpr (Config::kCluster > 1) {
    __syncwarp();  // idle lanes wait for the others
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// s_memory: this block's, aligned to kSwizzleBytes.
template <class Config>
__device__ __forceinline__ void run_block(const QfLinearParams& p, const TensorMaps& maps, const Walk& walk,
                                          const PartialSums& partials, char* s_memory) {
  const SharedMemory<Config> s(s_memory);
  if (threadIdx.x == 0) {
    s.init_barriers();
    if (walk.steps > 0) {
      prefetch_tensor_map(&maps.x);
      prefetch_tensor_map(&maps.w);
      if (has_up<Config>(p)) prefetch_tensor_map(&maps.up);
    }
    prefetch_tensor_map(&maps.out);
  }
  meet<Config>();            // the barriers are in place
  wait_for_previous_grid();  // it may write any operand, and use the same counters and copies
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Config::kProducerRegisters>();
    name_role(threadIdx.x < 32 ? "producer" : threadIdx.x < 64 ? "terms" : "nobody");
    if (threadIdx.x == 0) {
      produce<Config>(p, walk, maps, s);
      if (walk.is_short<Config>()) let_next_grid_start();  // which waits before it reads these results
    }
    if (threadIdx.x / 32 == 1) stage_terms<Config>(p, walk, s);
    if (Config::kCluster > 1) meet<Config>();  // no block ends while another may reach into it
  } else {
    name_role("consumer", int(threadIdx.x) / kWarpgroupThreads - 1);
    take_registers<Config::kConsumerRegisters>();
    Consumer<Config>(p, walk, partials, maps, s).run();
    if (Config::kCluster > 1) meet<Config>();  // no block ends while another may reach into it
  }
}

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
