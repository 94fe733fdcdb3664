// C entry of `gemm_mma`.
#include "kernels/linear/gemm_mma/run.cuh"

QF_EXPORT int64_t qf_gemm_mma_workspace(const QfLinearParams*) { return 0; }

QF_EXPORT int qf_gemm_mma(const QfLinearParams* p, void* stream) {
  using namespace qf::gemm_mma;
  using Config = qf::gemm_mma::Config<QF_DTYPE, QF_ARCH, QF_ACTIVATION>;
  if (const int status = qf::gemm::check_params(p, {QF_DTYPE, QF_ACTIVATION, QF_DTYPE})) return status;
  if (p->m == 0 || p->n == 0) return QF_OK;  // before the device is queried
  constexpr Source kWeights = Config::kGated ? Source::kPaired : Source::kOne;
  const qf::gemm::Operands operands = qf::gemm::operands_of(*p);
  const bool x_along_k = qf::gemm::x_along_k(*p), w_along_k = qf::gemm::w_along_k(*p);
  if (x_along_k && w_along_k) return run<Config, true, true, kWeights>(*p, operands, stream);
  if (x_along_k) return run<Config, true, false, kWeights>(*p, operands, stream);
  if (w_along_k) return run<Config, false, true, kWeights>(*p, operands, stream);
  return run<Config, false, false, kWeights>(*p, operands, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::gemm::status_text("gemm_mma", status); }
