// Counters in device memory that need no clearing before a launch: each library has its own, zero when it is loaded,
// and every kernel that uses them leaves them at zero (atomicInc wraps to 0 at the last count).
//
// Two kernels that may run concurrently must not share a counter. Kernels of one stream run in sequence, so a stream
// keeps the counters it was first given. A captured graph runs whenever it is launched, so it gets counters of its own,
// which it keeps; but the kernels that one stream captured run in sequence within it, and share them. A program that
// removes dependencies from a captured graph must keep these kernels in sequence.
// cudaStreamPerThread is a different stream in every thread, and its id is not guaranteed to differ, so it gets none,
// and its captured kernels share none. Where there are none, or all are taken, the caller provides counters and clears
// them.
//
// Every device has its own counters, so the same index on two devices is two counters: the index of a stream is stored
// once for all devices.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <mutex>

namespace qf {

// The counters of captured launches, from kFirst on.
template <int kFirst, int kAll>
class CapturedCounters {
 public:
  // The first of `wanted` counters, or -1. capture, stream: ids; one that captured a moment ago gets the same again.
  int take(unsigned long long capture, unsigned long long stream, int wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Taken& taken : recent_)
      if (taken.capture == capture && taken.stream == stream && taken.count >= wanted) return taken.first;
    const int first = take_alone(wanted);
    if (first >= 0) recent_[oldest_++ % kRecent] = {capture, stream, first, wanted};
    return first;
  }
  int take_unshared(int wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return take_alone(wanted);
  }

 private:
  struct Taken {
    unsigned long long capture, stream;
    int first, count;  // a count of 0: nothing was taken
  };
  // More streams than these that capture at the same time are given new counters every time, until there are none.
  static constexpr unsigned kRecent = 16;

  int take_alone(int wanted) {
    if (wanted > kAll - next_) return -1;
    next_ += wanted;
    return next_ - wanted;
  }

  std::mutex mutex_;
  Taken recent_[kRecent] = {};
  unsigned oldest_ = 0;
  int next_ = kFirst;
};

// Takes `wanted` counters from an array of kAll: kStreams streams have kEach each, the rest is for captured launches.
// Uses is any type that identifies the array. first: the index of the first, or -1. Returns a cudaError_t.
template <class Uses, int kStreams, int kEach, int kAll>
inline int take_counters(cudaStream_t stream, int wanted, int& first) {
  static_assert(kStreams * kEach <= kAll, "");
  first = -1;
  static CapturedCounters<kStreams * kEach, kAll> captured;
  cudaStreamCaptureStatus capturing;
  unsigned long long capture = 0, id = 0;  // never reused, unlike the addresses of streams
  if (const cudaError_t error = cudaStreamGetCaptureInfo(stream, &capturing, &capture)) {
    cudaGetLastError();  // clears the thread's last error
    return error;
  }
  const bool is_captured = capturing != cudaStreamCaptureStatusNone;
  if (stream == cudaStreamPerThread) {
    if (is_captured) first = captured.take_unshared(wanted);
    return cudaSuccess;
  }
  if (const cudaError_t error = cudaStreamGetId(stream, &id)) {
    cudaGetLastError();
    return error;
  }
  if (is_captured) {
    first = captured.take(capture, id, wanted);
    return cudaSuccess;
  }
  if (wanted > kEach) return cudaSuccess;
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
