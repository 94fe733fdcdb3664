// C entry of `int8_gemm_tc`.
#include "gemm/entry.cuh"
#include "kernels/linear/int8_gemm_tc/choose.cuh"
#include "kernels/linear/int8_gemm_tc/kernel.cuh"

namespace {

template <class Instance>
int launch(const QfLinearParams& p, void* stream) {
  using Shape = typename Instance::Shape;
  return qf::gemm::launch(qf_int8_gemm_tc_kernel<Shape, typename Instance::LoadX, typename Instance::LoadW>, p,
                          qf::gemm::operands_of(p), Shape::kBlockM,
                          qf::gemm::kOutColumns<qf::int8_gemm_tc::Config, Shape>, Shape::kThreads, Shape::kSharedBytes,
                          stream);
}

}  // namespace

QF_EXPORT int64_t qf_int8_gemm_tc_workspace(const QfLinearParams*) { return 0; }

QF_EXPORT int qf_int8_gemm_tc(const QfLinearParams* p, void* stream) {
  if (const int status = qf::gemm::check_params(p, {QF_I8, QF_ACTIVATION, QF_DTYPE})) return status;
  if (p->m == 0 || p->n == 0) return QF_OK;  // before the device is queried
  int multiprocessors = 0;
  if (const int status = qf::multiprocessors(multiprocessors)) return status;
  return qf::int8_gemm_tc::choose(*p, multiprocessors,
                                  [&](auto instance) { return launch<decltype(instance)>(*p, stream); });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::gemm::status_text("int8_gemm_tc", status); }
