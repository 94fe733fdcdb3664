// The quantization pass as a step of a kernel library.
#pragma once

#include <cuda_runtime.h>

#include "attn/sm90_quantize/plan.cuh"

namespace qf {

// overlaps: the kernel itself waits for the one before it on the stream, and may begin earlier.
template <class Kernel, class... Arguments>
int launch_on(cudaStream_t stream, Kernel* kernel, int64_t blocks, int threads, int shared_bytes, bool overlaps,
              const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// One or two launches; nothing waits for the host. What is launched next on the stream sees all of it.
template <class Element, int kHeadDim>
int launch_sm90_quantize(const QuantizeAll& all, cudaStream_t stream) {
  const auto launch = [stream](auto* kernel, const auto&... more) { return launch_on(stream, kernel, more...); };
  return run_sm90_quantize<Element, kHeadDim>(all, launch);
}

}  // namespace qf
