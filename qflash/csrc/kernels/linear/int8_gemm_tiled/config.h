// `int8_gemm_tiled` is specialised for -DQF_DTYPE, the type of out, and -DQF_ACTIVATION. Tiles: gemm/tiled/config.cuh.
#pragma once

#include "gemm/tiled/config.cuh"

namespace qf {
namespace int8_gemm_tiled {

using Config = gemm::TiledConfig<int8_t, gemm::OutOf<QF_DTYPE>::Type, QF_ACTIVATION>;

}  // namespace int8_gemm_tiled
}  // namespace qf
