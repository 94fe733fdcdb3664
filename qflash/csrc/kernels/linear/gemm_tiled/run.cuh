// The kernel for operands of a given layout, and its launch. Host side.
#pragma once

#include "gemm/entry.cuh"
#include "kernels/linear/gemm_tiled/kernel.cuh"

namespace qf {
namespace gemm_tiled {

using gemm::Source;

template <class Config, bool kXAlongK, bool kWAlongK, Source kWeights>
int run(const QfLinearParams& p, const gemm::Operands& operands, void* stream) {
  using namespace gemm;
  using LoadX = std::conditional_t<kXAlongK, RowsTile<Config, Source::kOne>, ColumnsTile<Config, Source::kOne>>;
  using LoadW = std::conditional_t<kWAlongK, RowsTile<Config, kWeights>, ColumnsTile<Config, kWeights>>;
  return gemm::launch(qf_gemm_tiled_kernel<Config, LoadX, LoadW>, p, operands, kTiledBlock, Config::kOutColumns,
                      kTiledThreads, kTiledSharedBytes, stream);
}

}  // namespace gemm_tiled
}  // namespace qf
