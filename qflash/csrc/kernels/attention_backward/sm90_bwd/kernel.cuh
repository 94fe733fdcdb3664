// sm90_bwd: gradients of attention for Hopper, float16 and bfloat16 in, float32 accumulators. There are no atomics, and
// no order of addition depends on timing: each gradient stays in the registers of one warpgroup from its first term to
// its last.
//
//   P = 2^(log2(e) (scale q . k - lse))     dP = dO V^T     dS = P (dP - delta)     delta = rowsum(dO * O) - dlse
//   dV = P^T dO     dK = scale dS^T Q     dQ = scale dS K
//
// Launches: copies of what TMA cannot address and of q and k rotated (attn/wgmma/relayout.cuh), delta
// (attn/backward/delta.cuh), the gradient of sinks (attn/backward/sinks.cuh), then dK and dV, and dQ from the dS that
// their kernel stored, for as many heads at a time as there is memory for (attn/backward/ds_tiles.h); without that
// memory dQ first, from recomputed S and dP, then dK and dV. The last two kernels share a frame (attn/wgmma/backward/):
// at head_dim 128, 128 rows are stationary in a block (256 for dQ from stored dS), and tiles of 64 columns are streamed
// (attn/wgmma/backward/config.cuh has the operands). For dK and dV keys are stationary, and the queries of all heads of
// their group are streamed; for dQ queries are stationary.
//
//   dK, dV                                            dQ
//              queries (streamed)                                keys (streamed)
//              | 64 | 64 | 64 ..                                 | 64 | 64 | 64 ..
//   keys   64  | S^T, dP^T: 64 x 64       consumer 1   queries 64 | S, dP: 64 x 64
//          64  | dK, dV += 64 x D         consumer 2           64 | dQ += 64 x D
//
// Roles (head_dim 128):
//   warpgroup 0   thread 0     produce: rows of a work tile, then its columns, by TMA
//   (24 regs)     thread 32    describe_work: which work tile is next, which columns it sees
//                 warps 2, 3   inspect: lse and delta of the streamed queries; NaN and infinity in columns that some
//                              rows must not see
//   warpgroups    dK, dV: S^T and dP^T 32 registers each, dK and dV 64 each, P and dS 16 each
//   1, 2 (240)    dQ (40 and 232): S and dP 32 each, dQ 64, dS 16; from stored dS four warpgroups (104), dQ 64
//
// Shared memory (head_dim 128): rows 2 x 32 KB; columns 4 stages of 2 x 16 KB; lse and delta 2 KB; 8 KB to exchange
// channels that rotate together; barriers. 204 KB.
//
// Pipeline of a consumer: consumer_keys.cuh, consumer_queries.cuh, consumer_ds.cuh. Bound: the weights, next to the
// tensor cores at 2048 cycles per tile of dK and dV; memory, for dQ from stored dS. docs/kernels/sm90_bwd.md has the
// budget.
#pragma once

#include "attn/backward/delta.cuh"
#include "attn/backward/sinks.cuh"
#include "attn/wgmma/backward/block.cuh"
#include "attn/wgmma/relayout.cuh"
#include "kernels/attention_backward/sm90_bwd/config.h"

namespace qf {
namespace sm90_bwd {

template <class Element, Of kOf, bool kPlain>
using Config = wgmma::backward::BackwardConfig<Shape<Element, QF_HEAD_DIM, kOf, kPlain>>;

}  // namespace sm90_bwd
}  // namespace qf

// delta = rowsum(dO * O) - dlse, then that of rows that see few keys.
template <class Element>
__global__ void __launch_bounds__(qf::kDeltaThreads)
    qf_sm90_bwd_delta_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                             const qf::DeltaAccess access) {
  qf::write_delta<Element>(params, grid, access);
}
template <class Element>
__global__ void __launch_bounds__(qf::kDeltaThreads, 2)
    qf_sm90_bwd_few_kernel(const __grid_constant__ QfAttnBwdParams params, const __grid_constant__ qf::Grid grid,
                           const __grid_constant__ qf::DeltaAccess access) {
  qf::write_delta_of_few<Element, true>(params, grid, access);
}

// The gradient of sinks, from delta.
__global__ void __launch_bounds__(qf::kSinkThreads)
    qf_sm90_bwd_sinks_kernel(const __grid_constant__ QfAttnBwdParams params) {
  extern __shared__ float4 s_memory[];
  qf::write_sink_gradient(params, reinterpret_cast<uint32_t*>(s_memory));
}

// dK and dV, or dQ.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    qf_sm90_bwd_kernel(const __grid_constant__ QfAttnBwdParams params,
                       const __grid_constant__ qf::wgmma::backward::TensorMaps maps,
                       const __grid_constant__ qf::TileSchedule schedule,
                       const __grid_constant__ qf::wgmma::backward::DsMemory ds,
                       const qf::wgmma::backward::Stores aligned) {
  extern __shared__ float4 s_memory[];
  qf::wgmma::backward::run_block<Config>(params, maps, schedule, ds, aligned, reinterpret_cast<char*>(s_memory));
}

// The relayout pass, for strides that TMA cannot address.
template <class Element>
__global__ void __launch_bounds__(qf::wgmma::kRelayoutThreads)
    qf_sm90_bwd_relayout_kernel(const __grid_constant__ QfAttnParams p,
                                const __grid_constant__ qf::wgmma::Relayout relayout, char* const copies,
                                const bool tables_vectorise) {
  qf::wgmma::relayout_tokens<Element>(p, relayout, copies, tables_vectorise);
}
