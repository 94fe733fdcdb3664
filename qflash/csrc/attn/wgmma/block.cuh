// One block and its warp roles.
#pragma once

#include "attn/wgmma/consumer.cuh"
#include "attn/wgmma/nonfinite.cuh"
#include "attn/wgmma/page_producer.cuh"
#include "attn/wgmma/producer.cuh"
#include "ptx/names.cuh"
#include "ptx/setmaxnreg.cuh"

namespace qf {
namespace wgmma {

// p: the problem as all roles see it; params: as the kernel's policies see it.
template <class Kernel>
__device__ __forceinline__ void run_block(const QfAttnParams& p, const typename Kernel::Params& params,
                                          const TensorMaps& maps, const TileSchedule& schedule, bool out_aligned,
                                          char* s_memory) {
  using Config = typename Kernel::Config;
  const SharedMemory<Config> s(s_memory);
  const int packed_tiles = PackedTiles::count<Config::kPaged>(p, Config::kBlockM, reinterpret_cast<int*>(s.work));
  if (threadIdx.x == 0) {
    s.init_barriers();
    prefetch_tensor_map(&maps.q);
    prefetch_tensor_map(&maps.k);
    prefetch_tensor_map(&maps.v);
  }
  Kernel::Weights::set_up(s);
  __syncthreads();  // the barriers are in place
  constexpr int kFirstInspector = kWarpgroupThreads - Config::kInspectorThreads;
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Config::kProducerRegisters>();
    name_role(threadIdx.x < 32 ? "producer" : threadIdx.x < 64 ? "describe_work" : "inspector");
    if constexpr (Config::kPaged) {
      if (threadIdx.x < 32) produce_pages(p, schedule, maps, s);
      if (threadIdx.x / 32 == 1) describe_work<Kernel, WholeWarp>(p, params, schedule, s, packed_tiles);
    } else {
      if (threadIdx.x == 0) produce(p, schedule, maps, s);
      if (threadIdx.x == 32) describe_work<Kernel, OneThread>(p, params, schedule, s, packed_tiles);
    }
    if (threadIdx.x >= kFirstInspector) inspect(s, threadIdx.x - kFirstInspector, typename Kernel::Inspector(params));
  } else {
    name_role("consumer", consumer_index());
    take_registers<Config::kConsumerRegisters>();
    Consumer<Kernel>(p, params, schedule, s).run(out_aligned);
  }
}

}  // namespace wgmma
}  // namespace qf
