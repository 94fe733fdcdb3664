// One block of either backward kernel, and its warp roles.
#pragma once

#include "attn/wgmma/backward/consumer_ds.cuh"
#include "attn/wgmma/backward/consumer_keys.cuh"
#include "attn/wgmma/backward/consumer_queries.cuh"
#include "attn/wgmma/backward/consumer_split.cuh"
#include "attn/wgmma/backward/inspect.cuh"
#include "attn/wgmma/backward/producer.cuh"
#include "ptx/names.cuh"
#include "ptx/setmaxnreg.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// params.workspace begins with delta (attn/backward/delta.cuh).
template <class Config>
__device__ __forceinline__ void run_block(const QfAttnBwdParams& params, const TensorMaps& maps,
                                          const TileSchedule& schedule, const DsMemory& ds, const Stores& aligned,
                                          char* s_memory) {
  const SharedMemory<Config> s(s_memory);
  const PackedFaults faults = PackedFaults::find(params.fwd);
  if (threadIdx.x == 0) {
    s.init_barriers();
    *s.faults = faults;
    prefetch_tensor_map(&maps.first_columns);
    if constexpr (!Config::kFromDs)
      for (const CUtensorMap* map : {&maps.first_rows, &maps.second_rows, &maps.second_columns})
        prefetch_tensor_map(map);
  }
  __syncthreads();  // the barriers are in place
  constexpr int kFirstInspector = kWarpgroupThreads - Config::kInspectorThreads;
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Config::kProducerRegisters>();
    name_role(threadIdx.x < 32 ? "producer" : threadIdx.x < 64 ? "describe_work" : "inspector");
    if (threadIdx.x == 0) produce(params.fwd, schedule, maps, ds, s);
    if (threadIdx.x == 32) describe_work(params.fwd, schedule, ds, s);
    if (threadIdx.x >= kFirstInspector) inspect(params.fwd, static_cast<const float*>(params.workspace), s);
  } else {
    name_role("consumer", consumer_index());
    take_registers<Config::kConsumerRegisters>();
    if constexpr (Config::kFromDs) {
      DsConsumer<Config>(params, s).run(schedule.rows, aligned);
    } else if constexpr (!Config::kKeysStay) {
      QueryConsumer<Config>(params, s).run(schedule.rows, aligned);
    } else if constexpr (!Config::kSplits) {
      KeyConsumer<Config>(params, ds, s).run(schedule.rows, aligned);
    } else {
      if (consumer_index() == 0)
        SplitConsumer<Config, true>(params, ds, s).run(schedule.rows, aligned);
      else
        SplitConsumer<Config, false>(params, ds, s).run(schedule.rows, aligned);
    }
  }
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
