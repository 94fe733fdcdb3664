// Layout of a block's shared memory, and every barrier of the block.
//
//   ring      filled by                          waited for by                     released by
//   work      describe_work                      producer, inspectors, consumers   the same
//   rows      producer (TMA)                     consumers                         consumers
//   columns   producer (TMA), then inspectors    inspectors, consumers             consumers
//   exchange  consumer 0 (kSplits)               consumer 1                        consumer 1
//
//   inspected  inspectors arrive once a stage has its statistics and, if some row does not see all of the tile, nothing
//              that zero weights would not cancel; consumers wait for both it and `full`
//   next_tile  producer arrives; describe_work waits, before it takes the next work tile
#pragma once

#include "attn/wgmma/backward/work_tile.cuh"
#include "hopper/ring.cuh"
#include "ptx/ldst.cuh"
#include "ptx/opaque.cuh"

namespace qf {
namespace wgmma {
namespace backward {

template <class Config>
struct SharedMemory {
  static constexpr int kStages = Config::kStages, kWorkTiles = Config::kWorkTiles;
  using Work = WorkTile<Config>;
  static_assert(sizeof(Ring<1>) + sizeof(Ring<Config::kExchanges>) + sizeof(Ring<kStages>) +
                        (kStages + 1) * sizeof(Mbarrier) + sizeof(Ring<kWorkTiles>) + kWorkTiles * sizeof(Work) +
                        sizeof(PackedFaults) <=
                    Config::kBarrierBytes,
                "");

  char *first_rows, *second_rows;        // one tile each
  char *first_columns, *second_columns;  // kStages tiles each; kFromDs: second are tiles of dS
  // If keys are stationary: statistics of the queries of each stage, [kStages][kBlockN].
  float *minus_lse, *minus_delta;
  float* scratch;   // 2 kHeadDim for each warp of consumers
  Word4* exchange;  // kSplits: kExchanges tiles of P
  Ring<1>* row_ring;
  Ring<Config::kExchanges>* exchange_ring;
  Ring<kStages>* column_ring;
  Mbarrier* inspected;  // kStages
  Ring<kWorkTiles>* work_ring;
  Mbarrier* next_tile;
  Work* work;
  PackedFaults* faults;  // of the problem

  __device__ __forceinline__ explicit SharedMemory(char* memory) {
    first_rows = opaque_shared(memory + (kSwizzleBytes - shared_address(memory) % kSwizzleBytes) % kSwizzleBytes);
    second_rows = first_rows + Config::kRowBytes / 2;
    first_columns = first_rows + Config::kRowBytes;
    second_columns = first_columns + kStages * Config::ColumnTile::kBytes;
    char* const after = second_columns + kStages * Config::kSecondBytes;
    minus_lse = reinterpret_cast<float*>(after);
    minus_delta = minus_lse + kStages * Config::kBlockN;
    scratch = reinterpret_cast<float*>(after + Config::kStatisticsBytes);
    exchange = reinterpret_cast<Word4*>(after + Config::kStatisticsBytes + Config::kScratchBytes);
    row_ring = reinterpret_cast<Ring<1>*>(exchange + Config::kExchanges * Config::kExchangeBytes / 16);
    exchange_ring = reinterpret_cast<Ring<Config::kExchanges>*>(row_ring + 1);
    column_ring = reinterpret_cast<Ring<kStages>*>(exchange_ring + 1);
    inspected = reinterpret_cast<Mbarrier*>(column_ring + 1);
    work_ring = reinterpret_cast<Ring<kWorkTiles>*>(inspected + kStages);
    next_tile = reinterpret_cast<Mbarrier*>(work_ring + 1);
    work = reinterpret_cast<Work*>(next_tile + 1);
    faults = reinterpret_cast<PackedFaults*>(work + kWorkTiles);
  }
  // Called by one thread. Arrivals are counted in warps, except those of inspectors, of the exchange of P, and of the
  // two producer threads.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = Config::kConsumers * 4, kInspectorWarps = Config::kInspectorThreads / 32;
    row_ring->init(kConsumerWarps, "rows full", "rows empty");
    exchange_ring->init(kWarpgroupThreads, "P full", "P empty", kWarpgroupThreads);
    column_ring->init(kConsumerWarps, "columns full", "columns empty");
    work_ring->init(kConsumerWarps + 1 + kInspectorWarps, "work full", "work empty");
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&inspected[i], Config::kInspectorThreads);  // each thread arrives for what it wrote
      name_barrier(&inspected[i], "columns inspected", i);
    }
    mbarrier_init(next_tile, 1);
    name_barrier(next_tile, "next tile", 0);
    fence_mbarrier_init();  // makes the barriers visible to TMA
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
