// `gemm_mma` is specialised for -DQF_ARCH (compute capability times ten), -DQF_DTYPE (QF_F16 or QF_BF16), the type of x
// and w, and -DQF_ACTIVATION. Tile shapes: gemm/mma/config.cuh.
#pragma once

#include "gemm/mma/config.cuh"

namespace qf {
namespace gemm_mma {

// out is of the operands' type, or float32, as p.out_dtype specifies.
template <int kDtype, int kArch, int kActivation>
using Config = gemm::MmaConfig<typename ElementOf<kDtype>::Type, void, kArch, kActivation>;

}  // namespace gemm_mma
}  // namespace qf
