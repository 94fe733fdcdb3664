// C entry of `sm90_linear_bwd`, the gradients of linear layers on Hopper: the passes over elements and over rows are
// linear_bwd's, the products sm90_gemm's. docs/kernels/sm90_linear_bwd.md has tiles, roles, shared memory and speed.
#include "kernels/linear/sm90_gemm/run.cuh"
#include "kernels/linear_backward/linear_bwd/run.cuh"
#include "kernels/linear_backward/sm90_linear_bwd/config.h"

namespace {

using namespace qf;
using namespace qf::sm90_linear_bwd;
using linear_bwd::Dh;
using linear_bwd::Memory;

struct Products {
  static int64_t workspace_bytes(const QfLinearBwdParams& p, const Dh& dh) {
    const QfLinearParams dx = of_weights(p, dh, {}), dw = of_inputs(p, dh, nullptr, {});
    const int64_t of_dx = linear_bwd::w_along_k(p) ? bytes_of<ByWeightsAlongK>(dx) : bytes_of<ByWeights>(dx);
    const int64_t of_dw = bytes_of<ByInputs>(dw);
    return of_dx > of_dw ? of_dx : of_dw;
  }
  static int by_weights(const QfLinearBwdParams& p, const Dh& dh, const Memory& memory, cudaStream_t stream) {
    const QfLinearParams dx = of_weights(p, dh, memory);
    return linear_bwd::w_along_k(p) ? sm90_gemm::run_fastest<ByWeightsAlongK>(dx, stream)
                                    : sm90_gemm::run_fastest<ByWeights>(dx, stream);
  }
  static int by_inputs(const QfLinearBwdParams& p, const Dh& dh, void* g_out, const Memory& memory,
                       cudaStream_t stream) {
    return sm90_gemm::run_fastest<ByInputs>(of_inputs(p, dh, g_out, memory), stream);
  }

 private:
  static QfLinearParams of_weights(const QfLinearBwdParams& p, const Dh& dh, const Memory& memory) {
    static_assert(gemm::wgmma::kStepBytes == linear_bwd::kStepColumns * sizeof(linear_bwd::Element),
                  "du is a step off");
    QfLinearParams q = linear_bwd::product(p.m, p.k, p.n, p.dx, memory);
    q.activation = p.activation == QF_SWIGLU ? QF_SWIGLU : QF_IDENTITY;  // two chained weights, or one
    q.x = dh.g_data, q.x_stride_m = dh.stride, q.x_stride_k = 1;
    q.w = p.w, q.w_stride_k = p.w_stride_n, q.w_stride_n = p.w_stride_k;
    q.up = p.up, q.up_stride_k = p.up_stride_n, q.up_stride_n = p.up_stride_k;
    return q;
  }
  static QfLinearParams of_inputs(const QfLinearBwdParams& p, const Dh& dh, void* g_out, const Memory& memory) {
    QfLinearParams q = linear_bwd::product(p.k, p.n, p.m, g_out, memory);
    q.x = p.x, q.x_stride_m = 1, q.x_stride_k = p.x_stride_m;
    q.w = dh.g_data, q.w_stride_k = dh.stride, q.w_stride_n = 1;
    return q;
  }
  template <class Problem>
  static int64_t bytes_of(const QfLinearParams& q) {
    return q.m == 0 || q.n == 0 ? 0 : sm90_gemm::workspace_bytes<sm90_gemm::SmallTile<Problem>>(q);
  }
};

}  // namespace

QF_EXPORT int64_t qf_sm90_linear_bwd_workspace(const QfLinearBwdParams* p) {
  return linear_bwd::workspace_bytes<Products>(p);
}

QF_EXPORT int qf_sm90_linear_bwd(const QfLinearBwdParams* p, void* stream) {
  return linear_bwd::run<Products>(p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return gemm::status_text("sm90_linear_bwd", status); }
