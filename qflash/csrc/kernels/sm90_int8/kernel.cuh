#pragma once

#include "kernels/sm90_int8/config.h"
// What follows is made for those tiles.
#include "attn/sm90/block.cuh"
#include "attn/sm90/inspect.cuh"
#include "kernels/sm90_int8/inspect.cuh"
#include "kernels/sm90_int8/math.cuh"

template <bool kPlain>
__global__ void __launch_bounds__(qf::sm90::kThreads, 1)
    qf_sm90_int8_kernel(const __grid_constant__ qf::sm90::Quantized a, const __grid_constant__ qf::sm90::Maps maps,
                        const __grid_constant__ qf::sm90::Items items, const bool out_aligned) {
  using namespace qf::sm90;
  extern __shared__ float4 s_memory[];
  if constexpr (kFp8)
    work<Math<kPlain>>(a.attn, a, maps, items, EightBits{a}, out_aligned, s_memory);
  else
    work<Math<kPlain>>(a.attn, a, maps, items, SixteenBits(), out_aligned, s_memory);
}
