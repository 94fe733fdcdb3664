// Statuses of the CUDA runtime that kernels' launch code may get here: the numbers and names are CUDA's.
#pragma once

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorSymbolNotFound = 500,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

namespace emulate {

inline cudaError_t last_error = cudaSuccess;

inline cudaError_t as_last_error(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace emulate

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = emulate::last_error;
  emulate::last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error);

const char* cudaGetErrorString(cudaError_t error);
