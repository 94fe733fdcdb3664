// The error texts of kernel libraries, by status.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "qflash.h"

#define QF_EXPORT extern "C" __attribute__((visibility("default")))

namespace qf {

// refuses: what else the kernel does not support, as a clause that begins with a comma.
inline const char* status_text(const char* kernel, int status, const char* refuses = "") {
  static thread_local char text[512];
  switch (status) {
    case QF_OK:
      return "success";
    case QF_UNSUPPORTED:
      snprintf(
          text, sizeof text,
          "kernel '%s' was built for another dtype, precision, kind of k and v, softcap or head_dim%s, or a length or "
          "the work is past what 32 bits count",
          kernel, refuses);
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

}  // namespace qf
