// A ring of stages in shared memory between a producer and its consumers. Each stage has two mbarriers: `full` (its
// data may be read) and `empty` (all readers are done, it may be overwritten).
//
//   producer:  wait_empty, fill (or a copy that arrives at `full` by itself), advance
//   consumer:  wait_full, read, release, advance
#pragma once

#include "ptx/names.cuh"

namespace qf {

template <int kStages>
struct Ring {
  Mbarrier full[kStages], empty[kStages];

  // readers: the number of arrivals at `empty`, when readers are done with a stage; writers: at `full`. The names are
  // for diagnostics.
  __device__ __forceinline__ void init(int readers, const char* full_name = "full", const char* empty_name = "empty",
                                       int writers = 1) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], writers);
      mbarrier_init(&empty[i], readers);
      name_barrier(&full[i], full_name, i);
      name_barrier(&empty[i], empty_name, i);
    }
  }
};

// One thread's position in a ring: the number of stages it has passed. A stage's barriers complete one phase per round,
// so `passed` determines the stage and the parity of the phase to wait for.
template <int kStages>
struct RingPosition {
  static_assert((kStages & (kStages - 1)) == 0, "a division otherwise");
  uint32_t passed = 0;

  __device__ __forceinline__ int stage() const { return int(passed % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return passed / kStages & 1; }
  __device__ __forceinline__ void advance() { ++passed; }
  __device__ __forceinline__ RingPosition previous() const { return {passed - 1}; }
  __device__ __forceinline__ RingPosition next() const { return {passed + 1}; }

  __device__ __forceinline__ void wait_full(Ring<kStages>& ring) const { mbarrier_wait(&ring.full[stage()], parity()); }
  __device__ __forceinline__ bool is_full(Ring<kStages>& ring) const {
    return mbarrier_test(&ring.full[stage()], parity());
  }
  // In the first round no stage has been filled: all are empty.
  __device__ __forceinline__ void wait_empty(Ring<kStages>& ring) const {
    mbarrier_wait(&ring.empty[stage()], parity() ^ 1);
  }
  __device__ __forceinline__ void fill(Ring<kStages>& ring) const { mbarrier_arrive(&ring.full[stage()]); }
  __device__ __forceinline__ void release(Ring<kStages>& ring) const { mbarrier_arrive(&ring.empty[stage()]); }
};

}  // namespace qf
