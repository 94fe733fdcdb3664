// One block of a test's kernel, launched as the library launches its own and waited for. Returns a cudaError_t.
#pragma once

#include "common/launch.cuh"

template <class... Parameters, class... Arguments>
int launch_one(int threads, int shared_bytes, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (const int status = qf::launch({1, threads, shared_bytes, nullptr}, kernel, arguments...)) return status;
  return cudaDeviceSynchronize();
}
