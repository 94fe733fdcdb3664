// The only launcher of kernels, and the device queries a launch needs. Never throws, never synchronises.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "common/limits.h"
#include "common/refusals.h"

namespace qf {

// Allows `kernel` more than 48 KB of dynamic shared memory, once per device.
inline int allow_shared_memory(const void* kernel, int bytes) {
  struct Allowed {
    std::atomic<const void*> kernel;
    std::atomic<uint64_t> devices;  // one bit each
  };
  constexpr int kKernels = 32;  // remembered per library; for further kernels, every launch sets the attribute
  static Allowed all[kKernels];
  if (bytes <= 48 * 1024) return QF_OK;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  Allowed* own = nullptr;
  for (Allowed& one : all) {
    const void* known = nullptr;  // compare_exchange stores the kernel that occupies the slot
    if (one.kernel.compare_exchange_strong(known, kernel) || known == kernel) {
      own = &one;
      break;
    }
  }
  if (own && own->devices.load(std::memory_order_relaxed) & bit) return QF_OK;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    cudaGetLastError();  // clears the thread's last error
    return error;
  }
  if (own) own->devices.fetch_or(bit, std::memory_order_relaxed);
  return QF_OK;
}

// How a kernel is launched.
struct Launch {
  int64_t blocks;  // 1 .. kMostBlocks
  int threads;
  int shared_bytes;  // dynamic
  cudaStream_t stream;
  bool overlaps = false;  // the kernel itself waits for the previous one on the stream (ptx/griddepcontrol.cuh)
  int cluster = 1;        // blocks of a cluster; divides `blocks`
};

// A Launch in CUDA's form.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};

  explicit LaunchConfig(const Launch& how) {
    config.gridDim = dim3(unsigned(how.blocks));
    config.blockDim = dim3(unsigned(how.threads));
    config.dynamicSmemBytes = size_t(how.shared_bytes);
    config.stream = how.stream;
    config.attrs = attributes;
    if (how.overlaps) {
      cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.cluster > 1) {
      cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = unsigned(how.cluster);
      cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;  // config points to attributes
  LaunchConfig& operator=(const LaunchConfig&) = delete;
};

template <class... Parameters, class... Arguments>
int launch(const Launch& how, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (const int status = allow_shared_memory(reinterpret_cast<const void*>(kernel), how.shared_bytes)) return status;
  const LaunchConfig with(how);
  const cudaError_t error = cudaLaunchKernelEx(&with.config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // clears the thread's last error
  return error;
}

// The number of SMs of the current device, queried once.
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

// Stream-ordered memory for one launch.
struct Borrowed {
  cudaStream_t on;
  void* memory = nullptr;
  cudaError_t take(int64_t bytes) { return cudaMallocAsync(&memory, size_t(bytes), on); }
  ~Borrowed() {
    if (memory) cudaFreeAsync(memory, on);
  }
};

}  // namespace qf
