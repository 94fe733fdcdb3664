// C entry of `gelu_linear_wmma`.
#include "gemm/entry.cuh"
#include "kernels/linear/gelu_linear_wmma/kernel.cuh"

QF_EXPORT int64_t qf_gelu_linear_wmma_workspace(const QfLinearParams*) { return 0; }

QF_EXPORT int qf_gelu_linear_wmma(const QfLinearParams* p, void* stream) {
  using namespace qf::gelu_linear_wmma;
  if (const int status = qf::gemm::check_params(p, {QF_DTYPE, kActivation, QF_DTYPE})) return status;
  if (!qf::gemm::x_along_k(*p)) return QF_UNSUPPORTED;
  const auto run = [&](auto* kernel) {
    return qf::gemm::launch(kernel, *p, qf::gemm::operands_of(*p), kBlock, kBlock, kThreads, kSharedBytes, stream);
  };
  return qf::gemm::w_along_k(*p) ? run(qf_gelu_linear_wmma_kernel<RowsTile>)
                                 : run(qf_gelu_linear_wmma_kernel<DownTile>);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::gemm::status_text("gelu_linear_wmma", status); }
