// Stages of shared memory that producer and consumers go round: each has a barrier that says it is full and one that
// says it is empty.
#pragma once

#include "ptx/mbarrier.cuh"

namespace qf {

template <int kStages>
struct Ring {
  Mbarrier full[kStages], empty[kStages];

  // readers: how many arrive when they are done with a stage.
  __device__ __forceinline__ void init(int readers) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], readers);
    }
  }
};

// Where somebody stands in a ring: how many stages they are past.
template <int kStages>
struct Place {
  static_assert((kStages & (kStages - 1)) == 0, "a division otherwise");
  uint32_t past = 0;

  __device__ __forceinline__ int stage() const { return int(past % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return past / kStages & 1; }
  __device__ __forceinline__ void advance() { ++past; }
  __device__ __forceinline__ Place before() const { return {past - 1}; }
  __device__ __forceinline__ Place after() const { return {past + 1}; }

  __device__ __forceinline__ void wait_full(Ring<kStages>& ring) const { mbarrier_wait(&ring.full[stage()], parity()); }
  __device__ __forceinline__ bool is_full(Ring<kStages>& ring) const {
    return mbarrier_test(&ring.full[stage()], parity());
  }
  // The first time round nobody has filled a stage: it is empty.
  __device__ __forceinline__ void wait_empty(Ring<kStages>& ring) const {
    mbarrier_wait(&ring.empty[stage()], parity() ^ 1);
  }
  __device__ __forceinline__ void fill(Ring<kStages>& ring) const { mbarrier_arrive(&ring.full[stage()]); }
  __device__ __forceinline__ void release(Ring<kStages>& ring) const { mbarrier_arrive(&ring.empty[stage()]); }
};

}  // namespace qf
