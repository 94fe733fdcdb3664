// Layout of a block's shared memory, and every barrier of the block.
//
//   ring         filled by            waited for by                     released by
//   work         describe_work        producer, inspectors, consumers   the same
//   q            producer (TMA)       consumers                         consumers
//   k            producer (TMA)       consumers                         consumers
//   v            producer (TMA)       consumers, inspectors             consumers, inspectors
//
//   v_inspected  inspectors arrive; consumers wait, in tiles that are not whole
//   next_tile    producer arrives; describe_work waits, before it takes the next work tile
#pragma once

#include "attn/wgmma/work_tile.cuh"
#include "hopper/ring.cuh"
#include "ptx/opaque.cuh"

namespace qf {
namespace wgmma {

template <class Config>
struct SharedMemory {
  static constexpr int kStages = Config::kStages, kQStages = Config::kQStages, kWorkTiles = Config::kWorkTiles;
  using Work = WorkTile<Config>;
  static_assert(sizeof(Ring<kQStages>) + 2 * sizeof(Ring<kStages>) + (kStages + 1) * sizeof(Mbarrier) +
                        sizeof(Ring<kWorkTiles>) + kWorkTiles * sizeof(Work) <=
                    Config::kBarrierBytes,
                "");

  char *q, *k, *v;  // kQStages and kStages tiles
  Ring<kQStages>* q_ring;
  Ring<kStages>*k_ring, *v_ring;
  // kStages barriers, used in turn by the tiles of V that are not whole: the tile holds nothing that zero weights would
  // not cancel. Consumers are past such a tile before another takes its stage, so no waiter is a phase behind.
  Mbarrier* v_inspected;
  Ring<kWorkTiles>* work_ring;
  Mbarrier* next_tile;
  Work* work;
  char* scratch;  // kScratchBytes

  __device__ __forceinline__ explicit SharedMemory(char* memory) {
    q = opaque_shared(memory + (kSwizzleBytes - shared_address(memory) % kSwizzleBytes) % kSwizzleBytes);
    k = q + kQStages * Config::QTile::kBytes;
    v = k + kStages * Config::KTile::kBytes;
    q_ring = reinterpret_cast<Ring<kQStages>*>(v + kStages * Config::VTile::kBytes);
    k_ring = reinterpret_cast<Ring<kStages>*>(q_ring + 1);
    v_ring = k_ring + 1;
    v_inspected = reinterpret_cast<Mbarrier*>(v_ring + 1);
    work_ring = reinterpret_cast<Ring<kWorkTiles>*>(v_inspected + kStages);
    next_tile = reinterpret_cast<Mbarrier*>(work_ring + 1);
    work = reinterpret_cast<Work*>(next_tile + 1);
    scratch = reinterpret_cast<char*>(q_ring) + Config::kBarrierBytes;
  }
  // Called by one thread. Arrivals are counted in warps, except those of the two producer threads.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4, kInspectorWarps = Config::kInspectorThreads / 32;
    q_ring->init(kConsumerWarps, "q full", "q empty");
    k_ring->init(kConsumerWarps, "K full", "K empty");
    v_ring->init(kConsumerWarps + kInspectorWarps, "V full", "V empty");
    work_ring->init(kConsumerWarps + 1 + kInspectorWarps, "work full", "work empty");
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&v_inspected[i], kInspectorWarps);
      name_barrier(&v_inspected[i], "V inspected", i);
    }
    mbarrier_init(next_tile, 1);
    name_barrier(next_tile, "next tile", 0);
    fence_mbarrier_init();  // makes the barriers visible to TMA
  }
};

}  // namespace wgmma
}  // namespace qf
