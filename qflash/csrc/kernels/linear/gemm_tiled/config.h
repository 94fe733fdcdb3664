// `gemm_tiled` is specialised for -DQF_DTYPE (a QfDtype), the type of x and w, and -DQF_ACTIVATION. Tiles:
// gemm/tiled/config.cuh.
#pragma once

#include "gemm/tiled/config.cuh"

namespace qf {
namespace gemm_tiled {

// out is of the operands' type, or float32, as p.out_dtype specifies.
template <int kDtype, int kActivation>
using Config =
    gemm::TiledConfig<typename ElementOf<kDtype>::Type, std::conditional_t<kDtype == QF_F32, float, void>, kActivation>;

}  // namespace gemm_tiled
}  // namespace qf
