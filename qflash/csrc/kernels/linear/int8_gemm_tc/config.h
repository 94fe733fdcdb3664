// `int8_gemm_tc` is specialised for -DQF_ARCH (compute capability times ten), -DQF_DTYPE, the type of out, and
// -DQF_ACTIVATION. Tile shapes: gemm/mma/config.cuh.
#pragma once

#include "gemm/mma/config.cuh"

namespace qf {
namespace int8_gemm_tc {

using Config = gemm::MmaConfig<int8_t, gemm::OutOf<QF_DTYPE>::Type, QF_ARCH, QF_ACTIVATION>;

}  // namespace int8_gemm_tc
}  // namespace qf
