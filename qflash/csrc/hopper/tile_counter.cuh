// Counters for dynamic tile schedules that need no clearing before a launch: a library's own, zero when it is loaded,
// and zero again after every kernel that drew from one (TileSchedule::for_each).
//
// Two kernels that may run at the same time must not share a counter. Kernels of one stream follow each other, so a
// stream keeps the counter it got first. A kernel in a captured graph runs whenever the graph does: it gets one that is
// nobody else's. cudaStreamPerThread is another stream in every thread, and nothing promises that its id is, too: it
// gets none. Where there is none, or counters have run out, the caller brings one and clears it.
//
// Every device has counters of its own, so that the same index on two devices is two counters: which stream has which
// index is remembered once for all devices.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace qf {

constexpr int kStreamCounters = 1024, kTileCounters = 1 << 16;
static __device__ unsigned tile_counters[kTileCounters];

// Of the launch: an index into tile_counters, or -1. Returns a cudaError_t.
inline int take_tile_counter(cudaStream_t stream, int& counter) {
  counter = -1;
  cudaStreamCaptureStatus capturing;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capturing)) {
    cudaGetLastError();  // clears the thread's last error
    return error;
  }
  if (capturing != cudaStreamCaptureStatusNone) {
    static std::atomic<int> captured{kStreamCounters};
    int next = captured.load(std::memory_order_relaxed);
    while (next < kTileCounters && !captured.compare_exchange_weak(next, next + 1)) {
    }
    if (next < kTileCounters) counter = next;
    return cudaSuccess;
  }
  if (stream == cudaStreamPerThread) return cudaSuccess;
  unsigned long long id = 0;  // never given twice, as addresses of streams are
  if (const cudaError_t error = cudaStreamGetId(stream, &id)) {
    cudaGetLastError();
    return error;
  }
  if (id + 1 == 0) return cudaSuccess;                             // no owner: 0 is nobody
  static std::atomic<unsigned long long> owners[kStreamCounters];  // id + 1
  for (int probe = 0; probe < kStreamCounters; ++probe) {
    const int i = int((id + probe) % kStreamCounters);
    unsigned long long owner = owners[i].load(std::memory_order_relaxed);
    if (owner == 0 && owners[i].compare_exchange_strong(owner, id + 1)) owner = id + 1;
    if (owner != id + 1) continue;
    counter = i;
    return cudaSuccess;
  }
  return cudaSuccess;
}

}  // namespace qf
