// The quantization pass as a step of a kernel library.
#pragma once

#include <cuda_runtime.h>

#include "attn/sm90_quantize/plan.cuh"

namespace qf {

// One or two launches; nothing waits for the host. What is launched next on the stream sees all of it.
template <class Element, int kHeadDim>
int launch_sm90_quantize(const QuantizeAll& all, cudaStream_t stream) {
  return run_sm90_quantize<Element, kHeadDim>(all,
                                              [stream](auto* kernel, int64_t blocks, int threads, int shared_bytes,
                                                       bool overlaps, const auto&... arguments) -> int {
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
                                              });
}

}  // namespace qf
