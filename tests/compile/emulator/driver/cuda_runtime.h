// Stands in for CUDA's header of the same name: what finds the driver's encoder of tensor maps.
#pragma once

#include "cuda.h"

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorSymbolNotFound = 500 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault };

inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* status) {
  *found = reinterpret_cast<void*>(host::encode_tiled);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
