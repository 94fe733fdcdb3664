// `sm90_linear_bwd` is specialised for -DQF_DTYPE (QF_F16 or QF_BF16), as the passes of linear_bwd are. Its products
// are problems of sm90_gemm:
//
//   product     left operand, along         right operand, along
//   dx          dh, its depth (n)           w, its depth where n is contiguous, else its columns (k)
//   dw, dup     x, its rows (k)             dh or du, its columns (n)
#pragma once

#include "kernels/linear/sm90_gemm/config.h"

namespace qf {
namespace sm90_linear_bwd {

// The epilogue only rounds and stores; for SwiGLU there are two weights in sequence along the depth.
template <bool kXAlongM, bool kWAlongN>
struct Product : sm90_gemm::Problem<false, QF_DTYPE, QF_IDENTITY, kXAlongM, kWAlongN> {
  static constexpr gemm::Source kSource = gemm::Source::kChained;
  static constexpr bool kSumsAlone = true;
};
using ByWeights = Product<false, false>;
using ByWeightsAlongK = Product<false, true>;
using ByInputs = Product<true, true>;

}  // namespace sm90_linear_bwd
}  // namespace qf
