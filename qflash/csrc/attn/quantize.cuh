// Quantization as a step of any kernel library: fill a QfQuantizeParams, give it quantize_workspace() bytes, launch.
#pragma once

#include <cuda_runtime.h>

#include "attn/quantize_plan.cuh"

namespace qf {

// Bytes that launch_quantize wants for shapes and words like these; pointers are not looked at.
inline int64_t quantize_workspace(const QfQuantizeParams& p) {
  return check_quantize(p) == QF_OK ? plan_quantize(p).workspace_bytes() : 0;
}

// Several launches on one stream; nothing waits for the host. Without kLarge, head_dim is at most kWide and a scale's
// tokens fit a block.
template <class Element, bool kLarge = false>
int launch_quantize(const QfQuantizeParams& p, cudaStream_t stream) {
  if (const int status = check_quantize(p)) return status;
  return run_quantize<Element, kLarge>(p, [stream](auto* kernel, int64_t blocks, const auto&... arguments) -> int {
    kernel<<<unsigned(blocks), kQuantizeThreads, kQuantizeSharedBytes, stream>>>(arguments...);
    return cudaGetLastError();
  });
}

}  // namespace qf
