// C entry of `int8_gemm_tiled`.
#include "gemm/entry.cuh"
#include "kernels/linear/int8_gemm_tiled/kernel.cuh"

namespace {

using Config = qf::int8_gemm_tiled::Config;

template <template <class, qf::gemm::Source> class Weights>
int launch(const QfLinearParams& p, void* stream) {
  using namespace qf::gemm;
  using LoadX = RowsTile<Config, Source::kOne>;
  using LoadW = Weights<Config, Config::kGated ? Source::kPaired : Source::kOne>;
  return qf::gemm::launch(qf_int8_gemm_tiled_kernel<LoadX, LoadW>, p, operands_of(p), kTiledBlock, Config::kOutColumns,
                          kTiledThreads, kTiledSharedBytes, stream);
}

}  // namespace

QF_EXPORT int64_t qf_int8_gemm_tiled_workspace(const QfLinearParams*) { return 0; }

QF_EXPORT int qf_int8_gemm_tiled(const QfLinearParams* p, void* stream) {
  if (const int status = qf::gemm::check_params(p, {QF_I8, QF_ACTIVATION, QF_DTYPE})) return status;
  return qf::gemm::w_along_k(*p) ? launch<qf::gemm::RowsTile>(*p, stream)
                                 : launch<qf::gemm::TransposedTile>(*p, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::gemm::status_text("int8_gemm_tiled", status); }
