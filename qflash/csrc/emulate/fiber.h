// Fibers: a stack for each thread of a block, and the switch between them.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <string>
#include <vector>

#include "emulate/observer.h"
#include "emulate/types.h"

namespace emulate {

// Something other than its warp or its block that a thread waits for.
struct Condition {
  bool (*happened)(const void* object, unsigned argument) = nullptr;
  std::string (*name)(const void* object, unsigned argument) = nullptr;
  const void* object = nullptr;
  unsigned argument = 0;
  uint64_t (*since)(const void* object, unsigned argument) = nullptr;  // when it happened, in the time of trace.h
};

// A copy of cp.async.
struct ThreadCopy {
  void* to;
  const void* from;
  int bytes;
  bool valid;
};

struct Fiber {
  jmp_buf place;  // where it waits; ucontext's own switch makes a system call for the signal mask each time
  std::unique_ptr<char[]> stack;
  bool started = false;  // a fiber that is done with one block continues with the next
  Waits waits;
  Condition condition;
  bool slow;
  unsigned gathers;
  uint64_t clock = 0;                           // of trace.h
  size_t span = 0;                              // its last span there
  std::vector<ThreadCopy> issued;               // since the last commit
  std::vector<std::vector<ThreadCopy>> groups;  // committed, oldest first
  std::vector<uint64_t> arrivals;               // of the groups, in the time of trace.h
};

constexpr int kStackBytes = 256 * 1024, kMostThreads = 1024;
extern Fiber fibers[kMostThreads];
inline jmp_buf scheduler;
inline bool timed = false;         // threads take turns in the time of trace.h
inline bool running = false;       // whether a thread of the kernel is running
extern void (*body)(const void*);  // the kernel, as one thread runs it
extern const void* body_arguments;
extern unsigned first_block;  // of the running cluster

// Threads of a cluster are numbered across its blocks: the running one, and its block's rank.
inline int fiber_now = 0;
inline int block_threads, block_shared_bytes, cluster_blocks;
inline Fiber& self() { return fibers[fiber_now]; }
inline int rank_now() { return fiber_now / block_threads; }
bool block_is_done(int rank);

void wait_for(Waits what);
void wait_for(const Condition& condition);

// Lets a thread of the cluster run until it waits.
void resume(int thread);

}  // namespace emulate
