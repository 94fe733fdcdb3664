// C entry of `linear_bwd`: products by the portable kernels of the forward pass. -DQF_ARCH (compute capability times
// ten) selects which.
#include "kernels/linear/gemm_mma/run.cuh"
#include "kernels/linear/gemm_tiled/run.cuh"
#include "kernels/linear_backward/linear_bwd/run.cuh"

namespace {

using namespace qf;
using gemm::byte_matrix;
using gemm::Operands;
using linear_bwd::Dh;
using linear_bwd::Element;
using linear_bwd::Memory;

// Otherwise products are gemm_tiled's: for float32, and for bfloat16 on Turing.
constexpr bool kTensorCores = QF_DTYPE == QF_F16 || (QF_DTYPE == QF_BF16 && QF_ARCH >= 80);
constexpr int kSize = sizeof(Element);

// out [m, n] = x w by the kernels of the forward pass, with operands in their memory layouts.
template <bool kXAlongK, bool kWAlongK, gemm::Source kWeights>
int multiply(const QfLinearParams& p, const Operands& operands, void* stream) {
  if constexpr (kTensorCores) {
    using Config = gemm::MmaConfig<Element, Element, QF_ARCH, QF_IDENTITY>;
    return gemm_mma::run<Config, kXAlongK, kWAlongK, kWeights>(p, operands, stream);
  } else {
    using Config = gemm::TiledConfig<Element, Element, QF_IDENTITY>;
    return gemm_tiled::run<Config, kXAlongK, kWAlongK, kWeights>(p, operands, stream);
  }
}

struct Products {
  static int64_t workspace_bytes(const QfLinearBwdParams&, const Dh&) { return 0; }

  static int by_weights(const QfLinearBwdParams& p, const Dh& dh, const Memory&, cudaStream_t stream) {
    const bool gated = p.activation == QF_SWIGLU, along_k = linear_bwd::w_along_k(p);
    const int64_t depth = gated ? 2 * dh.columns : dh.columns;
    QfLinearParams q = linear_bwd::product(p.m, p.k, depth, p.dx);
    q.up = gated ? p.up : nullptr;  // two weights: half of the depth each
    const auto weight = [&](const void* data, int64_t stride_k, int64_t stride_n) {
      return along_k ? byte_matrix(data, kSize, stride_n, p.n, p.k) : byte_matrix(data, kSize, stride_k, p.k, p.n);
    };
    Operands operands = {byte_matrix(dh.g_data, kSize, dh.stride, p.m, depth),
                         {weight(p.w, p.w_stride_k, p.w_stride_n), {}}};
    operands.w[1] = gated ? weight(p.up, p.up_stride_k, p.up_stride_n) : operands.w[0];
    constexpr gemm::Source kChained = gemm::Source::kChained;
    return along_k ? multiply<true, false, kChained>(q, operands, stream)
                   : multiply<true, true, kChained>(q, operands, stream);
  }

  static int by_inputs(const QfLinearBwdParams& p, const Dh& dh, void* g_out, const Memory&, cudaStream_t stream) {
    const Operands operands = {byte_matrix(p.x, kSize, p.x_stride_m, p.m, p.k),
                               {byte_matrix(dh.g_data, kSize, dh.stride, p.m, dh.columns), {}}};
    return multiply<false, false, gemm::Source::kOne>(linear_bwd::product(p.k, p.n, p.m, g_out), operands, stream);
  }
};

}  // namespace

QF_EXPORT int64_t qf_linear_bwd_workspace(const QfLinearBwdParams* p) {
  return linear_bwd::workspace_bytes<Products>(p);
}

QF_EXPORT int qf_linear_bwd(const QfLinearBwdParams* p, void* stream) {
  return linear_bwd::run<Products>(p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return gemm::status_text("linear_bwd", status); }
