#include "emulate/scheduler.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <vector>

#include "emulate/complaint.h"
#include "emulate/guard.h"
#include "emulate/named_barrier.h"
#include "emulate/names.h"
#include "emulate/trace.h"

namespace emulate {

constexpr unsigned kMostPatience = 64;  // rounds for which a warp or lane is slow

// Lets a thread run if it can. Returns whether it did.
static bool go_on(int thread) {
  Fiber& fiber = fibers[thread];
  const Condition& condition = fiber.condition;
  if (fiber.waits == Waits::kCondition && condition.happened(condition.object, condition.argument))
    fiber.waits = Waits::kNot;
  if (fiber.waits != Waits::kNot) return false;
  resume(thread);
  return true;
}

// Sets the result of __syncthreads_or for a block, all of whose threads have arrived.
static void take_votes(const std::vector<int>& block) {
  const int rank = block.front() / block_threads;
  or_result[rank] = or_sum[rank], or_sum[rank] = 0;
}

// Runs every thread of `members` that can run and is not slow; then, if all that are left wait for the same one of
// `kinds`, lets them go on. Returns whether anything moved.
static bool turn(const std::vector<int>& members, std::initializer_list<Waits> kinds) {
  bool moved = false;
  size_t waiting[int(Waits::kDone) + 1] = {};
  for (int thread : members) {
    if (!fibers[thread].slow) moved |= go_on(thread);
    ++waiting[int(fibers[thread].waits)];
  }
  for (Waits kind : kinds) {
    const size_t met = waiting[int(kind)];
    if (!met || met + waiting[int(Waits::kDone)] != members.size()) continue;
    if (kind == Waits::kBlock) take_votes(members);
    for (int thread : members)
      if (fibers[thread].waits == kind) fibers[thread].waits = Waits::kNot;
    moved = true;
  }
  return moved;
}

// Threads in the order of their turns: warps shuffled, and lanes within each.
struct Turns {
  std::vector<std::vector<int>> warps, blocks;

  Turns() : warps(size_t(cluster_blocks * block_threads + 31) / 32), blocks(size_t(cluster_blocks)) {
    for (int t = 0; t < cluster_blocks * block_threads; ++t) {
      warps[size_t(t) / 32].push_back(t);
      blocks[size_t(t / block_threads)].push_back(t);
    }
    for (auto& warp : warps) std::shuffle(warp.begin(), warp.end(), *order);
    std::shuffle(warps.begin(), warps.end(), *order);
  }
};

static void begin_cluster() {
  extension = nullptr;
  for (int rank = 0; rank < cluster_blocks; ++rank) {
    std::fill_n(s_memory + rank * kSharedWindow / sizeof(float4), size_t(block_shared_bytes) / sizeof(float4),
                make_float4(NAN, NAN, NAN, NAN));
    or_sum[rank] = 0;
    std::fill_n(named_barriers[rank], kNamedBarriers, NamedBarrier{});
  }
  const int threads = cluster_blocks * block_threads;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.waits = Waits::kNot;
    fiber.gathers = 0;
    fiber.slow = false;
    fiber.issued.clear();
    fiber.groups.clear();
    fiber.arrivals.clear();
    fiber.clock = launch_begin;
    fiber.span = ~size_t(0);
  }
  begin_names(threads);
  observe(Event::kBlockBegins, threads);
}

// When a thread can go on, in the time of trace.h; kNever if it cannot.
constexpr uint64_t kNever = ~uint64_t(0);
static uint64_t ready_at(const Fiber& fiber) {
  const Condition& condition = fiber.condition;
  if (fiber.waits == Waits::kNot) return fiber.clock;
  if (fiber.waits != Waits::kCondition || !condition.happened(condition.object, condition.argument)) return kNever;
  return std::max(fiber.clock, condition.since(condition.object, condition.argument));
}

// If all that are left of `members` wait for `kind`, lets them go on at the time of the last to arrive.
static bool meet(const std::vector<int>& members, Waits kind) {
  uint64_t last = 0;
  bool any = false;
  for (int thread : members) {
    const Fiber& fiber = fibers[thread];
    if (fiber.waits == Waits::kDone) continue;
    if (fiber.waits != kind) return false;
    last = std::max(last, fiber.clock);
    any = true;
  }
  if (!any) return false;
  if (kind == Waits::kBlock) take_votes(members);
  for (int thread : members)
    if (fibers[thread].waits == kind) fibers[thread].waits = Waits::kNot, fibers[thread].clock = last;
  return true;
}

// Runs the earliest warp, again and again, until none can go on.
static void run_in_time(std::vector<std::vector<int>>& warps, const std::vector<std::vector<int>>& blocks) {
  for (auto& warp : warps) std::sort(warp.begin(), warp.end());
  std::sort(warps.begin(), warps.end());
  while (complaint.empty()) {
    uint64_t earliest = kNever;
    const std::vector<int>* next = nullptr;
    for (const auto& warp : warps) {
      meet(warp, Waits::kWarp) || meet(warp, Waits::kShuffle);
      for (int thread : warp)
        if (ready_at(fibers[thread]) < earliest) earliest = ready_at(fibers[thread]), next = &warp;
    }
    bool met = false;
    for (const auto& block : blocks) met |= !next && meet(block, Waits::kBlock);
    if (met) continue;
    if (!next) return;
    for (int thread : *next) {
      const uint64_t ready = ready_at(fibers[thread]);
      if (ready == kNever) continue;
      fibers[thread].clock = ready;
      go_on(thread);
    }
  }
}

static bool cluster_is_done() {
  for (int rank = 0; rank < cluster_blocks; ++rank)
    if (!block_is_done(rank)) return false;
  return true;
}

// Returns false if a block is stuck or a thread failed: `complaint` has the reason.
static bool run_cluster() {
  begin_cluster();
  Turns turns_of;
  if (timed) run_in_time(turns_of.warps, turns_of.blocks);
  // With an extension, threads depend on each other by more than the block's barriers: one warp or lane at a time is so
  // slow that it goes on only when no other can.
  std::vector<int> slow;
  unsigned patience = 0;
  for (bool moved = !timed; moved && complaint.empty();) {
    moved = false;
    if (extension && patience-- == 0) {
      for (int t : slow) fibers[t].slow = false;
      slow = turns_of.warps[(*order)() % turns_of.warps.size()];
      if ((*order)() % 2) slow.resize(1);
      for (int t : slow) fibers[t].slow = true;
      patience = (*order)() % kMostPatience;
    }
    for (const auto& warp : turns_of.warps)
      while (turn(warp, {Waits::kWarp, Waits::kShuffle})) moved = true;
    for (const auto& block : turns_of.blocks) moved |= turn(block, {Waits::kBlock});
    if (!moved && extension && (*order)() % 2 && !cluster_is_done()) moved = extension->idle();
    if (moved) continue;
    for (int t : slow) moved |= go_on(t);
    if (!moved && extension && !cluster_is_done()) moved = extension->idle();
  }
  const bool done = cluster_is_done();
  if (!done) {
    complain(waiting());
    for (Fiber& fiber : fibers) fiber.started = false;  // their stacks are abandoned
  }
  if (extension) extension->end();
  observe(Event::kBlockEnds, !done);
  if (timed)
    for (size_t warp = 0; warp < role_names.size(); ++warp) {
      const unsigned warps = unsigned(block_threads + 31) / 32;
      blockIdx.x = first_block + unsigned(warp) / warps;
      record("role", unsigned(warp) % warps, 0, 0, role_names[warp]);
    }
  return complaint.empty();
}

bool run_blocks(void (*kernel)(const void*), const void* arguments, int64_t blocks, int cluster, int threads,
                int shared_bytes, unsigned seed) {
  std::mt19937 seeded(seed);
  order = &seeded;
  turns = 0;
  launch_begin = last_end;
  complaint.clear();
  blockDim = dim3(unsigned(threads));
  gridDim = dim3(unsigned(blocks));
  body = kernel;
  body_arguments = arguments;
  block_threads = threads;
  block_shared_bytes = shared_bytes;
  cluster_blocks = cluster;
  bool good = true;
  const Guard guard;
  for (int64_t block = 0; block < blocks && good; block += cluster) {
    blockIdx.x = first_block = unsigned(block);
    good = run_cluster();
  }
  order = nullptr;
  ++launches;
  return good;
}

}  // namespace emulate
