// Enough CUDA to run qflash's device code on the host: g++ reads this header before a kernel's.
//
// A block is run by one fiber per thread. A fiber runs until it meets its warp or its block; when all of them have,
// they go on. Warps, and lanes within a warp, take turns in an order drawn from a seed, so that code which relies on an
// order it did not ask for gives different bits for different seeds. Shared memory starts as NaN. Fibers that wait for
// something that cannot happen (a barrier some thread skips) are reported, not waited for.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::min;

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim;
alignas(16) float4 s_memory[256 * 1024 / sizeof(float4)];

namespace host {

enum class Waits { kNot, kWarp, kShuffle, kBlock, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Waits waits;
};

constexpr int kStackBytes = 256 * 1024;
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline float shuffled[1024];
inline int or_sum, or_result;

inline void wait_for(Waits what) {
  const unsigned self = threadIdx.x;
  fibers[self].waits = what;
  swapcontext(&fibers[self].context, &scheduler);
}

inline void fiber_main() {
  body();
  wait_for(Waits::kDone);
}

// Let every thread of `members` that may run do so; then, if all that are left wait for the same thing of the kinds
// given, let them go on. Returns whether anything moved.
inline bool turn(const std::vector<int>& members, std::initializer_list<Waits> kinds) {
  bool moved = false;
  for (int thread : members) {
    if (fibers[thread].waits != Waits::kNot) continue;
    threadIdx.x = thread;
    swapcontext(&scheduler, &fibers[thread].context);
    moved = true;
  }
  for (Waits kind : kinds) {
    bool all = true, any = false;
    for (int thread : members) {
      all &= fibers[thread].waits == kind || fibers[thread].waits == Waits::kDone;
      any |= fibers[thread].waits == kind;
    }
    if (!all || !any) continue;
    if (kind == Waits::kBlock) or_result = or_sum, or_sum = 0;
    for (int thread : members)
      if (fibers[thread].waits == kind) fibers[thread].waits = Waits::kNot;
    moved = true;
  }
  return moved;
}

// Returns false when the block is stuck.
inline bool run_block(int threads, int shared_bytes, std::mt19937& order) {
  const float4 nans = make_float4(NAN, NAN, NAN, NAN);
  std::fill_n(s_memory, shared_bytes / sizeof(float4), nans);
  if (int(fibers.size()) < threads) fibers.resize(threads);
  std::vector<std::vector<int>> warps(threads / 32);
  std::vector<int> block;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.waits = Waits::kNot;
    warps[t / 32].push_back(t);
    block.push_back(t);
  }
  for (auto& warp : warps) std::shuffle(warp.begin(), warp.end(), order);
  std::shuffle(warps.begin(), warps.end(), order);
  or_sum = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& warp : warps)
      while (turn(warp, {Waits::kWarp, Waits::kShuffle})) moved = true;
    moved |= turn(block, {Waits::kBlock});
  }
  return std::all_of(block.begin(), block.end(), [](int t) { return fibers[t].waits == Waits::kDone; });
}

template <class Kernel, class Params, class Grid>
int launch(Kernel* kernel, const Params& p, const Grid& grid, int threads, int shared_bytes, unsigned seed) {
  std::mt19937 order(seed);
  blockDim.x = threads;
  body = [&] { kernel(p, grid); };
  for (int64_t item = 0; item < grid.items; ++item) {
    blockIdx.x = unsigned(item);
    if (!run_block(threads, shared_bytes, order)) return 1;
  }
  return 0;
}

}  // namespace host

inline void __syncthreads() { host::wait_for(host::Waits::kBlock); }
inline int __syncthreads_or(int value) {
  host::or_sum |= value != 0;
  host::wait_for(host::Waits::kBlock);
  return host::or_result;
}
inline void __syncwarp() { host::wait_for(host::Waits::kWarp); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  const unsigned self = threadIdx.x;
  host::shuffled[self] = value;
  host::wait_for(host::Waits::kShuffle);
  const float other = host::shuffled[self ^ mask];
  host::wait_for(host::Waits::kShuffle);
  return other;
}
