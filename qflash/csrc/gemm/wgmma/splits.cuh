// Split-K: each split of a tile writes its partial accumulators to the workspace, and the last warp to arrive at a
// place reduces all of them in the order of the splits, whichever warp that is: the same bits every time. A place is
// the 16 rows of one warp, so no warp waits for another.
#pragma once

#include "common/counters.cuh"
#include "common/elements.cuh"
#include "gemm/wgmma/walk.cuh"
#include "ptx/relaxed.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

constexpr int kMostProcessors = 144;  // of any GPU of this architecture
// Places that have splits: of at most half as many blocks as run concurrently, with 8 consumer warps each.
constexpr int kPlaces = kMostProcessors / 2 * 8, kStreamsWithPlaces = 128, kAllPlaces = 1 << 18;
static __device__ unsigned place_counters[kAllPlaces];  // 0 between launches (common/counters.cuh)

struct PartialSums {
  char* g_sums;
  int first;  // of place_counters; -1: `cleared` has the counters
  unsigned* cleared;

  bool was_cleared() const { return first < 0; }  // by a launch, which the kernel follows
  __device__ __forceinline__ unsigned* counters() const { return first < 0 ? cleared : place_counters + first; }
};

// Host side. memory: kPlaces counters of the caller, cleared and used if the library has none left. Returns a
// cudaError_t.
inline int take_places(cudaStream_t stream, int places, unsigned* memory, PartialSums& partials) {
  struct Places;
  partials.cleared = memory;
  if (const int error = take_counters<Places, kStreamsWithPlaces, kPlaces, kAllPlaces>(stream, places, partials.first))
    return error;
  return partials.first >= 0 ? int(cudaSuccess) : int(cudaMemsetAsync(memory, 0, sizeof(unsigned) * places, stream));
}

__device__ __forceinline__ uint32_t bits_of_sum(float sum) { return float_to_bits(sum); }
__device__ __forceinline__ uint32_t bits_of_sum(int32_t sum) { return uint32_t(sum); }
__device__ __forceinline__ void sum_of_bits(uint32_t bits, float& sum) { sum = bits_to_float(bits); }
__device__ __forceinline__ void sum_of_bits(uint32_t bits, int32_t& sum) { sum = int32_t(bits); }

// Writes this warp's partial accumulators of a split; the last warp to arrive reduces those of all splits into `sums`.
// Returns whether this is that warp. warp: index among the cluster's consumer warps. The tile is cut, so walk.splits
// equals work.splits, without using a register.
template <class Config>
__device__ __forceinline__ bool add_splits(const PartialSums& partials, const Walk& walk, const Work& work, int warp,
                                           int lane, typename Config::Sum (&sums)[Config::kSumTiles][4]) {
  using Sum = typename Config::Sum;
  constexpr int kWarps = Config::kCluster * Config::kConsumerWarps;
  const int cut = work.tile - walk.whole;  // index among the cut tiles
  const auto sums_of = [&](int split) {
    const int64_t at = (int64_t(cut) * walk.splits + split) * kWarps + warp;
    return partials.g_sums + (at * Config::kSumTiles * 32 + lane) * 16;
  };
  char* const g_own = sums_of(work.split);
#pragma unroll
  for (int j = 0; j < Config::kSumTiles; ++j) {
    Word4 words;
#pragma unroll
    for (int e = 0; e < 4; ++e) words.word[e] = bits_of_sum(sums[j][e]);
    st_relaxed(g_own + j * 32 * 16, words);
  }
  __syncwarp();  // every lane has written its sums: the lane that counts releases them
  unsigned before = 0;
  if (lane == 0) before = atomic_inc_acq_rel(partials.counters() + cut * kWarps + warp, unsigned(walk.splits - 1));
  if (int(__shfl_sync(0xffffffffu, before, 0)) + 1 < walk.splits) return false;
  __syncwarp();  // what that lane acquired, for all lanes
  hold(sums);    // in their registers, however the compiler orders the loads: otherwise large int32 tiles spill
  // Two splits at a time where registers allow it: the loads of both are in flight together.
  constexpr int kAtOnce = Config::kSumTiles <= 16 ? 2 : 1;
#pragma unroll 1
  for (int first = 0; first < walk.splits; first += kAtOnce) {
    const char* const g_split = sums_of(first);
    const bool both = kAtOnce == 2 && first + 1 < walk.splits;
    const char* const g_other = both ? sums_of(first + 1) : g_split;
#pragma unroll
    for (int j = 0; j < Config::kSumTiles; ++j) {
      const Word4 words = ld_relaxed(g_split + j * 32 * 16);
      Word4 others = words;
      if (kAtOnce == 2) others = ld_relaxed(g_other + j * 32 * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        Sum more, other;
        sum_of_bits(words.word[e], more);
        sum_of_bits(others.word[e], other);
        sums[j][e] = first == 0 ? more : sums[j][e] + more;
        if (both) sums[j][e] += other;
      }
    }
  }
  return true;
}

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
