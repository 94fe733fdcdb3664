#include "emulate/runtime/cuda_runtime.h"

#include <map>

namespace emulate {

// What kernels requested beyond the default, on each device.
static std::map<std::pair<const void*, int>, int> shared_bytes_allowed;

int cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) return int(config.attrs[i].val.clusterDim.x);
  return 1;
}

cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  if (grid.x < 1 || grid.x > 0x7fffffffu || block.x < 1 || block.x > kMostThreads) return cudaErrorInvalidConfiguration;
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) return cudaErrorNotSupported;  // not emulated
  const int cluster = cluster_of(config);
  if (cluster < 1 || cluster > kMostClusterBlocks || grid.x % unsigned(cluster)) return cudaErrorInvalidConfiguration;
  if (cluster > 1 && (block.x % 32 || int(block.x) * cluster > kMostThreads)) return cudaErrorNotSupported;
  const auto asked = shared_bytes_allowed.find({kernel, device});
  const int allowed = asked == shared_bytes_allowed.end() ? kUsualSharedBytes : asked->second;
  return config.dynamicSmemBytes > size_t(allowed) ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace emulate

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > kMostSharedBytes)
    return emulate::as_last_error(cudaErrorInvalidValue);
  emulate::shared_bytes_allowed[{kernel, emulate::device}] = value;
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  constexpr size_t kAlignment = 256;
  *memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (!*memory && bytes > 0) return emulate::as_last_error(cudaErrorMemoryAllocation);
  memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned, int,
                                             cudaDriverEntryPointQueryResult* status) {
  const bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *found = known ? reinterpret_cast<void*>(emulate::encode_tiled) : nullptr;
  *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
