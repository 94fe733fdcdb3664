// Counters in device memory that need no clearing before a launch: a library's own, zero when it is loaded, and zero
// again after every kernel that counted with them (atomicInc wraps to 0 with the last count).
//
// Two kernels that may run at the same time must not share a counter. Kernels of one stream follow each other, so a
// stream keeps the counters it got first. A kernel in a captured graph runs whenever the graph does: it gets some that
// are nobody else's. cudaStreamPerThread is another stream in every thread, and nothing promises that its id is, too:
// it gets none. Where there are none, or counters have run out, the caller brings some and clears them.
//
// Every device has counters of its own, so that the same index on two devices is two counters: which stream has which
// index is remembered once for all devices.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace qf {

// Of an array of kAll counters: kStreams streams have kEach each, the rest is for captured launches, `wanted` each.
// Uses is any type that tells one array from another. first: the index of the first, or -1. Returns a cudaError_t.
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
  unsigned long long id = 0;  // never given twice, as addresses of streams are
  if (const cudaError_t error = cudaStreamGetId(stream, &id)) {
    cudaGetLastError();
    return error;
  }
  if (id + 1 == 0) return cudaSuccess;                      // no owner: 0 is nobody
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
