// A CUDA runtime for the host, instead of CUDA's header of this name: as much of it as launch.cu uses. Streams are in
// order because a launch is complete when it returns.
#pragma once

#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>

#include "emulate/control.h"
#include "emulate/runtime/cuda.h"
#include "emulate/runtime/errors.h"
#include "emulate/scheduler.h"

using cudaStream_t = struct CUstream_st*;
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(2))

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum { cudaEnableDefault = 0 };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace emulate {

inline unsigned long long capture = 0;  // the id of the capture that all streams report; nothing is captured

constexpr int kUsualSharedBytes = 48 * 1024;  // what a kernel may have without an opt-in
cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel);
int cluster_of(const cudaLaunchConfig_t& config);  // blocks

}  // namespace emulate

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const cudaError_t error = emulate::check_launch(*config, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return emulate::as_last_error(error);
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;  // of which each thread has a copy
  } const call = {kernel, {std::forward<Arguments>(arguments)...}};
  const auto run = [](const void* call) {
    std::apply(static_cast<const Call*>(call)->kernel, static_cast<const Call*>(call)->parameters);
  };
  const bool good = emulate::run_blocks(run, &call, config->gridDim.x, emulate::cluster_of(*config),
                                        int(config->blockDim.x), int(config->dynamicSmemBytes), emulate::seed);
  return emulate::as_last_error(good ? cudaSuccess : cudaErrorLaunchFailure);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

inline cudaError_t cudaGetDevice(int* device) {
  *device = emulate::device;
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulate::kDevices) return emulate::as_last_error(cudaErrorInvalidDevice);
  emulate::device = device;
  emulate::has_context = true;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= emulate::kDevices) return emulate::as_last_error(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrMultiProcessorCount) return emulate::as_last_error(cudaErrorInvalidValue);
  *value = device + 1;
  return cudaSuccess;
}

// As many as there are SMs for, with one block per SM.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel* kernel, const cudaLaunchConfig_t* config) {
  const cudaError_t error = emulate::check_launch(*config, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return emulate::as_last_error(error);
  *clusters = (emulate::device + 1) / emulate::cluster_of(*config);
  return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// Unwritten memory reads as NaN in every float format.
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t);

inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  std::free(memory);
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id) {
  *status = emulate::capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = emulate::capture;
  return cudaSuccess;
}

inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, int,
                                             cudaDriverEntryPointQueryResult* status);
