// ptx/named_barrier.cuh: three warpgroups hand a token round, each waiting for the one before it and for no other.
#include <cuda_runtime.h>

#include "ptx/named_barrier.cuh"

namespace turns {

constexpr int kGroups = 3, kGroupThreads = 128, kFirstBarrier = 2;

// Turn n belongs to group n % 3. Each of its threads leaves n for a thread of another warp of the next group, which
// counts it if that is what it finds. order[n]: whose turn it was.
__global__ void take_turns(int rounds, int* g_order, int* g_found) {
  __shared__ int s_left[kGroupThreads], s_turns;
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  int found = 0;
  if (threadIdx.x == 0) s_turns = 0;
  if (group == 0) s_left[thread] = -1;
  __syncthreads();
  if (group == kGroups - 1) qf::named_barrier_arrive(kFirstBarrier, 2 * kGroupThreads);  // the first turn
  for (int round = 0; round < rounds; ++round) {
    const int turn = round * kGroups + group;
    qf::named_barrier_sync(kFirstBarrier + group, 2 * kGroupThreads);
    found += s_left[kGroupThreads - 1 - thread] == turn - 1;
    qf::named_barrier_sync(kFirstBarrier + kGroups + group, kGroupThreads);  // the group by itself: all have looked
    s_left[thread] = turn;
    if (thread == 0) g_order[s_turns++] = group;
    const bool last = turn == rounds * kGroups - 1;
    if (!last) qf::named_barrier_arrive(kFirstBarrier + (group + 1) % kGroups, 2 * kGroupThreads);
  }
  g_found[threadIdx.x] = found;
}

}  // namespace turns

// order: int32 [3 rounds]; found: int32 [384].
extern "C" __attribute__((visibility("default"))) int try_turns(int rounds, int* order, int* found) {
  turns::take_turns<<<1, turns::kGroups * turns::kGroupThreads>>>(rounds, order, found);
  if (const cudaError_t error = cudaGetLastError()) return error;
  return cudaDeviceSynchronize();
}
