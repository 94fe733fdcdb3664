// Where things are in a block's shared memory.
#pragma once

#include "attn/wgmma/items.cuh"
#include "hopper/ring.cuh"
#include "ptx/opaque.cuh"

namespace qf {
namespace sm90 {

static_assert(sizeof(Ring<kQStages>) + 2 * sizeof(Ring<kStages>) + (kStages + 1) * sizeof(Mbarrier) +
                      sizeof(Ring<kRecords>) + kRecords * sizeof(Record) <=
                  kBarrierBytes,
              "");

struct Shared {
  char *q, *k, *v;  // kQStages and kStages tiles
  Ring<kQStages>* q_ring;
  Ring<kStages>*k_ring, *v_ring;
  // kStages, gone round by the tiles of V that some row does not see whole: the tile holds nothing that zero weights
  // would not blank out. Consumers are past such a tile before another takes its stage, so nobody is a phase behind.
  Mbarrier* v_checked;
  Ring<kRecords>* record_ring;
  Mbarrier* wanted;  // the next item
  Record* records;
  char* aside;  // kAsideBytes

  __device__ __forceinline__ explicit Shared(char* memory) {
    q = opaque_shared(memory + (kSwizzleBytes - shared_address(memory) % kSwizzleBytes) % kSwizzleBytes);
    k = q + kQStages * QTile::kBytes;
    v = k + kStages * KTile::kBytes;
    q_ring = reinterpret_cast<Ring<kQStages>*>(v + kStages * VTile::kBytes);
    k_ring = reinterpret_cast<Ring<kStages>*>(q_ring + 1);
    v_ring = k_ring + 1;
    v_checked = reinterpret_cast<Mbarrier*>(v_ring + 1);
    record_ring = reinterpret_cast<Ring<kRecords>*>(v_checked + kStages);
    wanted = reinterpret_cast<Mbarrier*>(record_ring + 1);
    records = reinterpret_cast<Record*>(wanted + 1);
    aside = reinterpret_cast<char*>(q_ring) + kBarrierBytes;
  }
};

}  // namespace sm90
}  // namespace qf
