// Counters in device memory that need no clearing before a launch: each library has its own, zero when it is loaded,
// and every kernel that uses them leaves them at zero (atomicInc wraps to 0 at the last count).
//
// Two kernels that may run concurrently must not share a counter. Kernels of one stream run in sequence, so a stream
// keeps the counters it was first given. A kernel in a captured graph runs whenever the graph does, so it gets counters
// of its own. cudaStreamPerThread is a different stream in every thread, and its id is not guaranteed to differ, so it
// gets none. Where there are none, or all are taken, the caller provides counters and clears them.
//
// Every device has its own counters, so the same index on two devices is two counters: the index of a stream is stored
// once for all devices.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace qf {

// Takes counters from an array of kAll: kStreams streams have kEach each, the rest is for captured launches, `wanted`
// each. Uses is any type that identifies the array. first: the index of the first, or -1. Returns a cudaError_t.
template <class Uses, int kStreams, int kEach, int kAll>
inline int take_counters(cudaStream_t stream, int wanted, int& first) {
  static_assert(kStreams * kEach <= kAll, "");
  first = -1;
  cudaStreamCaptureStatus capturing;
  if (const cudaError_t error = cudaStreamIsCapturing(stream, &capturing)) {
    cudaGetLastError();  // clears the thread's last error
    return error;
  }
  if (capturing != cudaStreamCaptureStatusNone) {
    static std::atomic<int> captured{kStreams * kEach};
    int next = captured.load(std::memory_order_relaxed);
    while (next <= kAll - wanted && !captured.compare_exchange_weak(next, next + wanted)) {
    }
    if (next <= kAll - wanted) first = next;
    return cudaSuccess;
  }
  if (stream == cudaStreamPerThread || wanted > kEach) return cudaSuccess;
  unsigned long long id = 0;  // never reused, unlike the addresses of streams
  if (const cudaError_t error = cudaStreamGetId(stream, &id)) {
    cudaGetLastError();
    return error;
  }
  if (id + 1 == 0) return cudaSuccess;                      // 0 means no owner
  static std::atomic<unsigned long long> owners[kStreams];  // id + 1
  for (int probe = 0; probe < kStreams; ++probe) {
    const int i = int((id + probe) % kStreams);
    unsigned long long owner = owners[i].load(std::memory_order_relaxed);
    if (owner == 0 && owners[i].compare_exchange_strong(owner, id + 1)) owner = id + 1;
    if (owner != id + 1) continue;
    first = i * kEach;
    return cudaSuccess;
  }
  return cudaSuccess;
}

}  // namespace qf
