// Layout of a block's shared memory, and all barriers of the block.
//
//   ring     filled by                       waited for by   released by
//   steps    producer (TMA), and the         consumers       consumers, of all blocks of the cluster: a producer
//            producers of the cluster                        that loads into their stage must know that it is empty
//   terms    stage_terms                     consumers       consumers
#pragma once

#include "gemm/wgmma/config.cuh"
#include "hopper/ring.cuh"
#include "ptx/opaque.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

template <class Config>
struct SharedMemory {
  char *x, *w;   // kStages tiles each
  char* panels;  // kWarpPanels for each consumer warp
  // Terms of the next epilogue: of its columns of accumulators, of its rows. Only integers have scales.
  float *bias, *w_scale, *x_scale;
  Ring<Config::kStages>* steps;
  Ring<1>* terms;

  // memory: aligned to kSwizzleBytes
  __device__ __forceinline__ explicit SharedMemory(char* memory) {
    x = opaque_shared(memory);
    w = x + Config::kStages * Config::X::Tile::kBytes;
    panels = w + Config::kStages * Config::W::Tile::kBytes;
    bias = reinterpret_cast<float*>(panels + Config::kPanelsBytes);
    w_scale = bias + Config::kColumns;
    x_scale = w_scale + Config::kColumns;
    steps = reinterpret_cast<Ring<Config::kStages>*>(panels + Config::kPanelsBytes + Config::kTermsBytes);
    terms = reinterpret_cast<Ring<1>*>(steps + 1);
    static_assert(sizeof *steps + sizeof *terms == Config::kBarrierBytes, "");
  }
  // One thread. Consumers arrive at `steps` once per warp, at `terms` once per thread: racecheck does not understand
  // that one lane may arrive for lanes that have synchronized.
  __device__ __forceinline__ void init_barriers() const {
    steps->init(Config::kCluster * Config::kConsumerWarps, "step full", "step empty");
    terms->init(32 * Config::kConsumerWarps, "terms full", "terms empty", 32);
    fence_mbarrier_init();  // makes the barriers visible to TMA and the cluster
  }
};

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
