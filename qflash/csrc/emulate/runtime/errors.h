// Statuses of the CUDA runtime that kernels' launch code may see here: the numbers and names are CUDA's.
#pragma once

#include "emulate/complaint.h"

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

inline const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorSymbolNotFound:
      return "cudaErrorSymbolNotFound";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
  }
  return "unrecognized error code";
}

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorSymbolNotFound:
      return "named symbol not found";
    case cudaErrorLaunchFailure:
      return emulate::complaint.c_str();
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}
