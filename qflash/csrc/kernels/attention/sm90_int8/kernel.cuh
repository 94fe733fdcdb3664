// sm90_int8: attention for Hopper with INT8 scores. S = Q Kt of integers, exact; P V in 16 bits or (QF_INT8_FP8) E4M3.
//
// Blocks, work tiles, roles and the pipeline are sm90_fwd's (attn/wgmma): one producer warpgroup, and two consumers
// with 64 rows each. A pass before (kernels/quantize_kv/sm90_quantize) converts q and K to int8 with scales, and, for
// E4M3, quantizes and transposes V. Specific to this kernel:
//
//              kBlockN = 128 keys (head_dim 256: 64)
//             +--------------------+
//   warpgroup | S = Q Kt  64 x 128 |  int32 accumulators in 64 registers; + the bits of 1.5 * 2^23 they are floats
//       1     |                    |  base-2 scores = slope * S: scale of the row * scale of 64 keys, distinct per row
//   warpgroup |           64 x 128 |
//       2     +--------------------+
//   O += P V   P from registers: 32 of 16-bit pairs, or 16 of four E4M3 each
//
// Weights are relative to a power of two, the reference of their row, taken from the row's first tile. If weights grow
// too large for P, the tile's scores are recomputed (rare_int8.cuh), and outputs and sums are rescaled to the new
// reference.
// E4M3: rows are divided by the sums of weights as they were rounded, and the mean that was subtracted from V is added
// back. The tensor cores' accumulators of such MMAs keep about 12 bits, so every 1024 keys they are added to float32
// accumulators in shared memory.
//
// Shared memory (head_dim 128):          int8      int8_fp8
//   q       2 stages [128][128] int8     32 KB       32 KB
//   k       [128][128] int8          2 * 16 KB    4 * 16 KB
//   v       [128][128], 16-bit       2 * 32 KB              or E4M3, [channel][key]: 4 * 16 KB
//   staged outputs                       32 KB       64 KB  or promoted; 1 KB of ones
//
// Bound: the tensor cores, at 1536 (int8) or 1024 (int8_fp8) cycles per pair of tiles, where sm90_fwd has 2048; next
// the exponentials, 1024 cycles whatever the precision; but above all what a warp executes serially, about 390 and 360
// instructions per tile. docs/kernels/sm90_int8.md has what was predicted, tried and measured.
#pragma once

#include "attn/wgmma/block.cuh"
#include "attn/wgmma/rare_int8.cuh"
#include "attn/wgmma/relayout.cuh"
#include "attn/wgmma/scores_int8.cuh"
#include "attn/wgmma/weights_16bit.cuh"
#include "attn/wgmma/weights_e4m3.cuh"
#include "kernels/attention/sm90_int8/config.h"
#include "kernels/attention/sm90_int8/output.cuh"

namespace qf {
namespace sm90_int8 {

template <class Element, int kHeadDim, bool kFp8, bool kPlain_>
struct Kernel {
  static constexpr bool kPlain = kPlain_;
  using Config = wgmma::TileConfig<Shape<Element, kHeadDim, kFp8>>;
  using Params = QuantizedProblem;
  using Scores = wgmma::Int8Scores<Config, kPlain>;
  using Weights = std::conditional_t<kFp8, wgmma::E4m3Weights<Config>, wgmma::SixteenBitWeights<Config, false>>;
  using Rare = wgmma::Int8Rare<Config, kFp8>;
  using Inspector = std::conditional_t<kFp8, wgmma::E4m3Inspector<Config>, wgmma::SixteenBitInspector<Config>>;
  using Work = wgmma::WorkTile<Config>;

  __device__ static __forceinline__ void describe(const Params& params, Work& work) { Scores::describe(params, work); }
  __device__ static __forceinline__ void store(const QfAttnParams& p, const wgmma::SharedMemory<Config>&,
                                               const Work& work, int, bool aligned, const Scores& scores,
                                               Weights& weights, const Rare& rare, wgmma::RowState& rows,
                                               float (&O)[1][Config::kOTiles][4]) {
    if constexpr (kFp8) {
      weights.finish_sums(rows);
      rare.finish(O);
      if (!Weights::kMeanAhead) weights.load_mean(work);
    }
    using Output = std::conditional_t<kFp8, E4m3Output<Config, kPlain>, Int8Output<Config, kPlain>>;
    constexpr int kPanelBytes = Panels<16, kHeadDim>::kPanelBytes;
    wgmma::finish<kPanelBytes>(p, work, O, rows, rare.s_outputs(), aligned, Output(scores.a, work, weights));
  }
};

}  // namespace sm90_int8
}  // namespace qf

template <class Kernel>
__global__ void __launch_bounds__(Kernel::Config::kThreads, 1)
    qf_sm90_int8_kernel(const __grid_constant__ qf::QuantizedProblem a,
                        const __grid_constant__ qf::wgmma::TensorMaps maps,
                        const __grid_constant__ qf::TileSchedule schedule, const bool out_aligned) {
  extern __shared__ float4 s_memory[];
  qf::wgmma::run_block<Kernel>(a.attn, a, maps, schedule, out_aligned, reinterpret_cast<char*>(s_memory));
}

// The relayout pass, for a 16-bit V whose strides TMA cannot address.
template <class Element>
__global__ void __launch_bounds__(qf::wgmma::kRelayoutThreads)
    qf_sm90_int8_relayout_kernel(const __grid_constant__ QfAttnParams p,
                                 const __grid_constant__ qf::wgmma::Relayout relayout, char* const copies,
                                 const bool tables_vectorise) {
  qf::wgmma::relayout_tokens<Element>(p, relayout, copies, tables_vectorise);
}
