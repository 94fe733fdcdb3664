// The host side every kernel library shares: checks before a launch, the texts behind statuses. Never throws, never
// synchronises.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdio>

#include "attn/kv.h"
#include "attn/schedule.cuh"
#include "qflash.h"

#define QF_EXPORT extern "C" __attribute__((visibility("default")))

namespace qf {

inline const char* status_text(const char* kernel, int status) {
  static thread_local char text[256];
  switch (status) {
    case QF_OK:
      return "success";
    case QF_UNSUPPORTED:
      snprintf(
          text, sizeof text,
          "kernel '%s' was built for another dtype, precision, kind of k and v or head_dim, or a length or the work "
          "is past what 32 bits count",
          kernel);
      return text;
    case QF_NO_MEMORY:
      snprintf(text, sizeof text, "kernel '%s' was given no workspace or one that is too small", kernel);
      return text;
    case QF_BAD_ABI:
      snprintf(text, sizeof text,
               "kernel '%s' was built from another qflash.h than its caller; clear the compile cache", kernel);
      return text;
  }
  if (status > 0 && status < QF_BAD_VALUE) {
    const cudaError_t error = static_cast<cudaError_t>(status);
    snprintf(text, sizeof text, "CUDA error %d (%s) launching kernel '%s': %s", status, cudaGetErrorName(error), kernel,
             cudaGetErrorString(error));
  } else {
    snprintf(text, sizeof text, "kernel '%s' returned unknown status %d", kernel, status);
  }
  return text;
}

// Row and key indices, rounded up to whole tiles, must fit 32 bits.
constexpr int32_t kMaxLength = 0x7fffffff - 4096;

// What no kernel library can serve, whatever its kernel.
inline int check_params(const QfAttnParams* p, int dtype, int precision = QF_NATIVE) {
  if (p->struct_bytes != int32_t(sizeof(QfAttnParams))) return QF_BAD_ABI;
  if (p->dtype != dtype || p->precision != precision) return QF_UNSUPPORTED;
  if (p->q_len > kMaxLength || p->k_len > kMaxLength) return QF_UNSUPPORTED;
  return QF_OK;
}

// The same for a kernel that takes K and V as arrays alone.
inline int check_arrays(const QfAttnParams* p, int dtype) {
  if (const int status = check_params(p, dtype)) return status;
  return kv_is_arrays(*p) ? QF_OK : QF_UNSUPPORTED;
}

// Allow `kernel` more than 48 KB of dynamic shared memory, once per device.
template <class Kernel>
inline int allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& devices_done) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (devices_done.load(std::memory_order_relaxed) & bit) return QF_OK;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();  // take it off the thread's record
    return error;
  }
  if (device < 64) devices_done.fetch_or(bit, std::memory_order_relaxed);
  return QF_OK;
}

// Multiprocessors of the current device, asked for once.
inline int multiprocessors(int& count) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  count = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (count > 0) return QF_OK;
  if (const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)) return error;
  if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  return QF_OK;
}

// Memory for one launch, in the order of its stream.
struct Borrowed {
  cudaStream_t on;
  void* memory = nullptr;
  cudaError_t take(int64_t bytes) { return cudaMallocAsync(&memory, size_t(bytes), on); }
  ~Borrowed() {
    if (memory) cudaFreeAsync(memory, on);
  }
};

// Launch a block for every item of the grid, in as many launches as that takes. `more`: the kernel's further arguments.
template <class Kernel, class Params, class... More>
inline int launch(Kernel* kernel, const Params& p, Grid grid, int threads, int shared_bytes, void* stream,
                  const More&... more) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  for (grid.first = 0; grid.first < grid.items; grid.first += kMostBlocks) {
    const int64_t left = grid.items - grid.first;
    kernel<<<unsigned(left < kMostBlocks ? left : kMostBlocks), threads, shared_bytes,
             static_cast<cudaStream_t>(stream)>>>(p, grid, more...);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  return QF_OK;
}

}  // namespace qf
