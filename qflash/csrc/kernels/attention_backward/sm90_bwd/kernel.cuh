// sm90_bwd: gradients of attention for Hopper, float16 and bfloat16 in, float32 sums.
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/wgmma/backward/block.cuh"
#include "attn/wgmma/relayout.cuh"
#include "kernels/attention_backward/sm90_bwd/config.h"

namespace qf {
namespace sm90_bwd {

template <class Element, bool kKeysStay, bool kPlain>
using Config = wgmma::backward::BackwardConfig<Shape<Element, QF_HEAD_DIM, kKeysStay, kPlain>>;

}  // namespace sm90_bwd
}  // namespace qf

// delta = rowsum(dO * O) - dlse.
template <class Element>
__global__ void __launch_bounds__(qf::kDeltaThreads)
    qf_sm90_bwd_delta_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                             const qf::DeltaAccess vector) {
  qf::write_delta<Element, true>(params, grid, vector);
}

// dK and dV, or dQ.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    qf_sm90_bwd_kernel(const __grid_constant__ QfAttnBwdParams params,
                       const __grid_constant__ qf::wgmma::backward::TensorMaps maps,
                       const __grid_constant__ qf::TileSchedule schedule, const qf::wgmma::backward::Stores aligned) {
  extern __shared__ float4 s_memory[];
  qf::wgmma::backward::run_block<Config>(params, maps, schedule, aligned, reinterpret_cast<char*>(s_memory));
}

// The pass before, for strides that TMA cannot walk.
template <class Element>
__global__ void __launch_bounds__(qf::wgmma::kRelayoutThreads)
    qf_sm90_bwd_relayout_kernel(const __grid_constant__ QfAttnParams p,
                                const __grid_constant__ qf::wgmma::Relayout relayout, char* const copies,
                                const bool tables_vectorise) {
  qf::wgmma::relayout_tokens<Element>(p, relayout, copies, tables_vectorise);
}
