// Where things are in a block's shared memory, and every barrier of the block.
//
//   ring     filled by                       waited for by   released by
//   steps    producer (TMA), and the         consumers       consumers, of all blocks of the cluster: whoever loads
//            producers of the cluster                        to a stage of theirs must know that they are done with it
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
  // Of the tile that is written out next: of columns of sums, of its rows. Integers alone have scales.
  float *bias, *w_scale, *x_scale;
  Ring<Config::kStages>* steps;
  Ring<1>* terms;

  // memory: whole kSwizzleBytes
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
  // One thread. At steps consumers arrive once a warp, at terms every thread does for itself: racecheck does not see
  // that lanes that met may arrive as one.
  __device__ __forceinline__ void init_barriers() const {
    steps->init(Config::kCluster * Config::kConsumerWarps, "step full", "step empty");
    terms->init(32 * Config::kConsumerWarps, "terms full", "terms empty", 32);
    fence_mbarrier_init();  // the barriers, to the copy engine and the cluster
  }
};

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
