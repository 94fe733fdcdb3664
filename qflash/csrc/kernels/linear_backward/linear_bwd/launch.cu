// C entry of `linear_bwd`.
#include "gemm/entry.cuh"
#include "kernels/linear/gemm_mma/run.cuh"
#include "kernels/linear/gemm_tiled/run.cuh"
#include "kernels/linear_backward/linear_bwd/kernel.cuh"

namespace qf {
namespace linear_bwd {
namespace {

using gemm::byte_matrix;
using gemm::Operands;

// dh, then the shares of the sums.
struct Workspace {
  int64_t columns, stride, dh_bytes, share_bytes;

  explicit Workspace(const QfLinearBwdParams& p) {
    const bool gated = p.activation == QF_SWIGLU, stored = p.activation != QF_IDENTITY;
    columns = padded_columns(p.n, gated);
    stride = gated ? 2 * columns : columns;
    dh_bytes = stored ? (p.m * stride * int64_t(sizeof(Element)) + 255) / 256 * 256 : 0;
    share_bytes = 2 * chunks_of(p.m) * p.n * int64_t(sizeof(float));
  }
  int64_t bytes() const { return dh_bytes + share_bytes; }
};

int check(const QfLinearBwdParams* p) {
  if (p->struct_bytes != int32_t(sizeof(QfLinearBwdParams))) return QF_BAD_ABI;
  const bool gated = p->activation == QF_SWIGLU;
  const int64_t most = gemm::kMostBytes / 2 / int64_t(sizeof(Element));  // rows of two matrices
  if (p->dtype != QF_DTYPE || p->activation < QF_IDENTITY || p->activation > QF_SWIGLU) return QF_UNSUPPORTED;
  if (p->bias_dtype != QF_DTYPE && p->bias_dtype != QF_F32) return QF_UNSUPPORTED;
  if (p->m < 0 || p->n < 0 || p->k < 0 || p->m > most || p->n > most || p->k > most) return QF_UNSUPPORTED;
  if (p->w_stride_k != 1 && p->w_stride_n != 1) return QF_UNSUPPORTED;
  if (gated && (p->w_stride_k == 1 ? p->up_stride_k : p->up_stride_n) != 1) return QF_UNSUPPORTED;
  return QF_OK;
}

bool aligned(const void* data, int64_t stride) {
  return !data || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * int64_t(sizeof(Element)) % 16 == 0);
}

Pass pass_of(const QfLinearBwdParams& p, const Workspace& w) {
  char* const memory = static_cast<char*>(p.workspace);
  const bool stored = w.dh_bytes > 0;
  const int64_t columns = stored ? w.columns : p.n;
  return {
      stored ? reinterpret_cast<Element*>(memory) : nullptr,
      w.stride,
      columns,
      reinterpret_cast<float*>(memory + w.dh_bytes),
      chunks_of(p.m),
      (columns + kTileColumns - 1) / kTileColumns,
      p.dbias || p.dup_bias,
      aligned(p.dout, p.dout_stride_m) && aligned(p.pre, p.n) && aligned(p.pre_up, p.n) && aligned(p.dresidual, p.n)};
}

int over_elements(const QfLinearBwdParams& p, const Pass& pass, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return QF_OK;
  const int64_t blocks = pass.tiles * pass.chunks;
  if (blocks > kMostBlocks) return QF_UNSUPPORTED;
  const Launch how = {blocks, kThreads, kSumsSharedBytes, stream};
  switch (p.activation) {
    case QF_GELU:
      return launch(how, qf_linear_bwd_slopes_kernel<QF_GELU>, p, pass);
    case QF_GELU_TANH:
      return launch(how, qf_linear_bwd_slopes_kernel<QF_GELU_TANH>, p, pass);
    case QF_SILU:
      return launch(how, qf_linear_bwd_slopes_kernel<QF_SILU>, p, pass);
    case QF_SWIGLU:
      return launch(how, qf_linear_bwd_slopes_kernel<QF_SWIGLU>, p, pass);
    default:
      return launch(how, qf_linear_bwd_slopes_kernel<QF_IDENTITY>, p, pass);
  }
}

int sum_over_rows(const QfLinearBwdParams& p, const Pass& pass, cudaStream_t stream) {
  if (!pass.sums || p.n == 0) return QF_OK;
  return launch({2 * ((p.n + 31) / 32), kThreads, kTotalsSharedBytes, stream}, qf_linear_bwd_totals_kernel, p, pass);
}

// out [m, n] = x w by the kernels of the forward pass, operands as they lie in memory.
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

QfLinearParams product(int64_t m, int64_t n, int64_t k, void* out) {
  QfLinearParams q{};
  q.struct_bytes = int32_t(sizeof q);
  q.dtype = q.out_dtype = q.bias_dtype = QF_DTYPE;
  q.m = m, q.n = n, q.k = k;
  q.out = out, q.out_stride_m = n;
  return q;
}

// dx = dh w^T: of SwiGLU, [dh du] [w up]^T.
int multiply_by_weights(const QfLinearBwdParams& p, const Pass& pass, void* stream) {
  constexpr int kSize = sizeof(Element);
  const bool gated = p.activation == QF_SWIGLU;
  const int64_t depth = pass.g_dh ? pass.stride : p.n;
  QfLinearParams q = product(p.m, p.k, depth, p.dx);
  q.up = gated ? p.up : nullptr;  // two weights: half of the depth each
  const auto weight = [&](const void* data, int64_t stride_k, int64_t stride_n) {
    return p.w_stride_n == 1 ? byte_matrix(data, kSize, stride_k, p.k, p.n)
                             : byte_matrix(data, kSize, stride_n, p.n, p.k);
  };
  Operands operands = {pass.g_dh ? byte_matrix(pass.g_dh, kSize, pass.stride, p.m, depth)
                                 : byte_matrix(p.dout, kSize, p.dout_stride_m, p.m, p.n),
                       {weight(p.w, p.w_stride_k, p.w_stride_n), {}}};
  operands.w[1] = gated ? weight(p.up, p.up_stride_k, p.up_stride_n) : operands.w[0];
  constexpr gemm::Source kChained = gemm::Source::kChained;
  return p.w_stride_n == 1 ? multiply<true, true, kChained>(q, operands, stream)
                           : multiply<true, false, kChained>(q, operands, stream);
}

// dw = x^T dh, or dup = x^T du, of which the columns past n are zeros.
int multiply_by_inputs(const QfLinearBwdParams& p, const void* dh, int64_t stride, int64_t columns, void* out,
                       void* stream) {
  constexpr int kSize = sizeof(Element);
  const Operands operands = {byte_matrix(p.x, kSize, p.x_stride_m, p.m, p.k),
                             {byte_matrix(dh, kSize, stride, p.m, columns), {}}};
  return multiply<false, false, gemm::Source::kOne>(product(p.k, p.n, p.m, out), operands, stream);
}

int run(const QfLinearBwdParams& p, void* stream) {
  const Workspace workspace(p);
  if (workspace.bytes() > 0 && (!p.workspace || p.workspace_bytes < workspace.bytes())) return QF_NO_MEMORY;
  const Pass pass = pass_of(p, workspace);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (pass.g_dh || pass.sums || p.dresidual)
    if (const int status = over_elements(p, pass, on)) return status;
  if (const int status = sum_over_rows(p, pass, on)) return status;
  if (p.dx)
    if (const int status = multiply_by_weights(p, pass, stream)) return status;
  const void* const dh = pass.g_dh ? pass.g_dh : p.dout;
  const int64_t stride = pass.g_dh ? pass.stride : p.dout_stride_m;
  if (p.dw)
    if (const int status = multiply_by_inputs(p, dh, stride, pass.columns, p.dw, stream)) return status;
  if (p.dup) return multiply_by_inputs(p, pass.g_dh + pass.stride / 2, stride, pass.columns, p.dup, stream);
  return QF_OK;
}

}  // namespace
}  // namespace linear_bwd
}  // namespace qf

QF_EXPORT int64_t qf_linear_bwd_workspace(const QfLinearBwdParams* p) {
  return qf::linear_bwd::check(p) == QF_OK ? qf::linear_bwd::Workspace(*p).bytes() : 0;
}

QF_EXPORT int qf_linear_bwd(const QfLinearBwdParams* p, void* stream) {
  if (const int status = qf::linear_bwd::check(p)) return status;
  return qf::linear_bwd::run(*p, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::gemm::status_text("linear_bwd", status); }
