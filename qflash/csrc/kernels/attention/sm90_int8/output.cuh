// What attn/wgmma/output.cuh requires of `sm90_int8`.
#pragma once

#include "attn/wgmma/weights_16bit.cuh"
#include "attn/wgmma/weights_e4m3.cuh"

namespace qf {
namespace sm90_int8 {

// The row bias, scale * (q . k_mean): smoothing subtracted it from all scores of a row, and lse lacks it. Scores that
// are not plain had it added before softcap.
template <bool kPlain, class Work>
__device__ __forceinline__ float row_bias(const QuantizedProblem& a, const Work& work, int row) {
  return kPlain ? a.attn.scale * a.q_dot_mean[work.facts.row + row] : 0.0f;
}

// V in 16 bits.
template <class Config, bool kPlain>
struct Int8Output : wgmma::SixteenBitOutput<Config> {
  const QuantizedProblem& a;

  template <class Weights>
  __device__ __forceinline__ Int8Output(const QuantizedProblem& params, const wgmma::WorkTile<Config>& work,
                                        const Weights&)
      : wgmma::SixteenBitOutput<Config>{params.attn, work}, a(params) {}
  __device__ __forceinline__ float lse_offset(int row) const { return row_bias<kPlain>(a, this->work, row); }
};

template <class Config, bool kPlain>
struct E4m3Output {
  static constexpr bool kRoundedSums = true, kMean = true;
  const QuantizedProblem& a;
  const wgmma::WorkTile<Config>& work;
  const wgmma::E4m3Weights<Config>& weights;
  const float gain;
  const float (&divisor)[2];

  __device__ __forceinline__ E4m3Output(const QuantizedProblem& params, const wgmma::WorkTile<Config>& work_tile,
                                        const wgmma::E4m3Weights<Config>& of_kernel)
      : a(params), work(work_tile), weights(of_kernel), gain(weights.v_scale), divisor(weights.rounded_l) {}
  __device__ __forceinline__ float2 mean(int j) const { return weights.v_mean[j]; }
  __device__ __forceinline__ float lse_offset(int row) const { return row_bias<kPlain>(a, work, row); }
  __device__ __forceinline__ float value(int key, int d) const {
    const int64_t column = wgmma::transposed_from(a.attn, work) + key;
    return wgmma::transposed_is_nan(a, work.facts.head, column, d) ? nan() : 0.0f;
  }
};

}  // namespace sm90_int8
}  // namespace qf
