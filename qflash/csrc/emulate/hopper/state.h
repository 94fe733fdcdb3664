// The state of a Hopper block in addition to threads and memory: barriers, copies in flight, wgmmas of warpgroups.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "emulate/scheduler.h"
#include "emulate/trace.h"

namespace emulate {

// A pointer's offset in the cluster's shared memory, and in its block's: a shared address.
inline unsigned cluster_offset(const void* s_pointer) {
  return unsigned(static_cast<const char*>(s_pointer) - reinterpret_cast<const char*>(s_memory));
}
inline unsigned shared_offset(const void* s_pointer) { return cluster_offset(s_pointer) % kSharedWindow; }
// Shared memory of a block of the cluster; which block a pointer points into.
inline char* shared_memory(int rank) { return reinterpret_cast<char*>(s_memory) + rank * kSharedWindow; }
inline int rank_of(const void* s_pointer) { return int(cluster_offset(s_pointer) / kSharedWindow); }
std::string at_byte(const void* s_pointer);

// A tensor as cuTensorMapEncodeTiled describes it: dimensions innermost first.
struct TensorMap {
  const char* base;  // nullptr: nothing was encoded
  int64_t size[4], stride[4];
  int rows, row_bytes;  // of a box; swizzled, 64 bytes or 128
};

struct MbarrierState {
  int32_t bytes;  // still to arrive in this phase
  uint16_t pending;
  uint16_t arrivals : 15, parity : 1;
};
static_assert(sizeof(MbarrierState) == 8, "an mbarrier is 64 bits");

struct BoxCopy {
  char* s_to;
  TensorMap map;
  int at[4];
  MbarrierState* barrier;
  const void* run = nullptr;  // not a box: map.row_bytes contiguous bytes from here
};

// A box in flight to global memory.
struct BoxStore {
  const char* s_from;
  TensorMap map;
  int at[4];
  int thread;      // of the cluster
  unsigned group;  // of that thread
};

// One wgmma of a warpgroup: what its threads must agree on, and what each of them provides.
struct Product {
  int n, element_bytes;
  bool integers, transposed, add;  // integers: of the accumulators
  uint64_t a, b;
  float (*convert)(uint16_t);
  bool a_transposed = false;
  bool a_in_registers = false;
  int copy = 0;  // of the code
  int started = 0;
  struct {
    float* sums;
    const uint32_t* a;
    uint32_t a_was[4];
  } of[128];
};

// wgmmas that were committed together.
struct Group {
  unsigned end;                           // the product after its last
  bool early;                             // computed once committed
  int committed = 0;                      // by how many threads
  uint64_t committed_at = 0, finish = 0;  // in the time of trace.h
};

struct Warpgroup {
  std::deque<Product> products;
  unsigned first_product = 0;  // products[0], counted from the beginning
  std::vector<Group> groups;
  std::vector<std::pair<int, int>> waits;  // how many groups may be pending, how many threads have arrived
  unsigned computed = 0, waited = 0;       // products
  size_t next = 0;                         // the first group that is not computed
  int registers = 0, traded = 0;           // per thread; threads that have requested them
};

// Accumulators of one thread, from the first wgmma that adds to them to the wait for the last.
struct Held {
  float* sums;
  int count;
  unsigned last;  // product
  std::vector<float> value;
};

// What one thread has started, committed and waited for.
struct ThreadProducts {
  unsigned products = 0, groups = 0, waits = 0;  // so far
  unsigned done = 0;                             // products waited for
  bool fenced = false;
  int copy = 0;  // of the code that starts products
  std::vector<Held> held;
};

constexpr uint32_t kTaken = 0x7fc0dead;  // accumulators that the tensor cores own

// The state of one thread's TMA stores, and of its arrival at the cluster's barrier.
struct ThreadState {
  unsigned store_groups = 0;  // committed
  unsigned generation = 0;    // of the cluster's barrier, when it arrived there
  bool arrived = false;
};

// The barrier of all threads of a cluster.
struct ClusterBarrier {
  int arrived = 0;
  unsigned generation = 0;
  uint64_t last = 0, completed = 0;  // in the time of trace.h
};

// Shared memory as TMA and wgmma see it: without what threads wrote and have not fenced since. A fence applies to all
// that any thread wrote before the next access: more than a GPU guarantees, but a missing fence shows.
struct AsyncMemory {
  alignas(1024) char bytes[kMostClusterBlocks * kSharedWindow];
  bool fenced;  // since the last access

  void begin();
  // Brings it up to date before an access.
  void publish() {
    for (int rank = 0; fenced && rank < cluster_blocks; ++rank)
      memcpy(bytes + rank * kSharedWindow, shared_memory(rank), size_t(block_shared_bytes));
    fenced = false;
  }
  bool knows(const void* s_pointer, size_t size) const {
    return memcmp(bytes + cluster_offset(s_pointer), s_pointer, size) == 0;
  }
};
extern AsyncMemory async_memory;

struct Hopper : Extension {
  std::set<const void*> barriers;  // that were initialised
  std::set<const void*> unfenced;  // of those, the ones that TMA does not see yet
  std::vector<BoxCopy> in_flight;
  std::vector<BoxStore> stores;  // that have not been read from shared memory yet
  ClusterBarrier cluster;
  // In the time of trace.h: the latest arrival of a barrier's phase and of the previous one, and when units are free.
  struct BarrierTimes {
    uint64_t arrival = 0, completed = 0;
  };
  std::map<const void*, BarrierTimes> times;
  uint64_t tensor_cores_free[kMostClusterBlocks], copy_engine_free[kMostClusterBlocks];
  Warpgroup warpgroups[kMostThreads / 128];
  ThreadProducts threads[kMostThreads];
  ThreadState states[kMostThreads];

  void begin();
  bool idle() override;
  void end() override;
};
extern Hopper hopper;

// Everything that only Hopper can do calls these: the first call of a block initialises its state.
Hopper& used_hopper();
Warpgroup& own_warpgroup();
ThreadProducts& own_products();
ThreadState& own_state();

}  // namespace emulate
