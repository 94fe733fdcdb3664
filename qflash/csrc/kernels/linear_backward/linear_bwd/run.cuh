// The launches of a backward pass in their order: elements, sums over rows, then products, whose kernels the
// including file provides. Host side.
#pragma once

#include "gemm/entry.cuh"
#include "kernels/linear_backward/linear_bwd/kernel.cuh"

namespace qf {
namespace linear_bwd {

// dh, the shares of the sums, then the products' own workspace, at multiples of 256 bytes.
struct Workspace {
  int64_t columns, stride, dh_bytes, share_bytes;

  explicit Workspace(const QfLinearBwdParams& p) {
    const bool gated = p.activation == QF_SWIGLU, stored = p.activation != QF_IDENTITY;
    columns = padded_columns(p.n, gated);
    stride = gated ? 2 * columns : columns;
    dh_bytes = stored ? whole(p.m * stride * int64_t(sizeof(Element))) : 0;
    share_bytes = 2 * chunks_of(p.m) * p.n * int64_t(sizeof(float));
  }
  int64_t products_at() const { return whole(dh_bytes + share_bytes); }
  int64_t bytes(int64_t of_products) const {
    return of_products > 0 ? products_at() + of_products : dh_bytes + share_bytes;
  }

 private:
  static int64_t whole(int64_t bytes) { return (bytes + 255) / 256 * 256; }
};

inline int check(const QfLinearBwdParams* p) {
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

inline bool aligned(const void* data, int64_t stride) {
  return !data || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * int64_t(sizeof(Element)) % 16 == 0);
}

inline Pass pass_of(const QfLinearBwdParams& p, const Workspace& w) {
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

inline int over_elements(const QfLinearBwdParams& p, const Pass& pass, cudaStream_t stream) {
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

inline int sum_over_rows(const QfLinearBwdParams& p, const Pass& pass, cudaStream_t stream) {
  if (!pass.sums || p.n == 0) return QF_OK;
  return launch({2 * ((p.n + 31) / 32), kThreads, kTotalsSharedBytes, stream}, qf_linear_bwd_totals_kernel, p, pass);
}

// dh as products read it: from the first launch, or dout if there is no activation.
struct Dh {
  const void* g_data;       // [m][columns]; for SwiGLU [m][dh, du][columns]
  int64_t stride, columns;  // columns past n are zeros

  // Before addresses are known, g_data is meaningless.
  Dh(const QfLinearBwdParams& p, const Workspace& w)
      : g_data(w.dh_bytes > 0 ? p.workspace : p.dout),
        stride(w.dh_bytes > 0 ? w.stride : p.dout_stride_m),
        columns(w.dh_bytes > 0 ? w.columns : p.n) {}
  Dh du() const {
    Dh x = *this;
    x.g_data = static_cast<const Element*>(g_data) + columns;
    return x;
  }
};

// Is w contiguous along k? Tested first: if w is contiguous along n, too, up need only be contiguous along k.
inline bool w_along_k(const QfLinearBwdParams& p) { return p.w_stride_k == 1; }

// The products' own workspace, which they use in turn.
struct Memory {
  void* data;
  int64_t bytes;
};

// g_out [m, n] of depth k, to which Products adds the operands.
inline QfLinearParams product(int64_t m, int64_t n, int64_t k, void* g_out, const Memory& memory = {}) {
  QfLinearParams q{};
  q.struct_bytes = int32_t(sizeof q);
  q.dtype = q.out_dtype = q.bias_dtype = QF_DTYPE;
  q.m = m, q.n = n, q.k = k;
  q.out = g_out, q.out_stride_m = n;
  q.workspace = memory.data, q.workspace_bytes = memory.bytes;
  return q;
}

// Products provides, for a checked problem,
//   int64_t workspace_bytes(p, dh)                 the most that one of them needs, also before addresses are known
//   int by_weights(p, dh, memory, stream)          dx = dh w^T; for SwiGLU [dh du] [w up]^T
//   int by_inputs(p, dh, g_out, memory, stream)    dw = x^T dh, or dup = x^T du
template <class Products>
int64_t workspace_bytes(const QfLinearBwdParams* p) {
  if (check(p) != QF_OK) return 0;
  const Workspace workspace(*p);
  return workspace.bytes(Products::workspace_bytes(*p, Dh(*p, workspace)));
}

template <class Products>
int run(const QfLinearBwdParams* given, cudaStream_t stream) {
  if (const int status = check(given)) return status;
  const QfLinearBwdParams& p = *given;
  const Workspace workspace(p);
  const Dh dh(p, workspace);
  const int64_t for_products = Products::workspace_bytes(p, dh), needed = workspace.bytes(for_products);
  if (needed > 0 && (!p.workspace || p.workspace_bytes < needed)) return QF_NO_MEMORY;
  const Memory memory = {static_cast<char*>(p.workspace) + workspace.products_at(), for_products};
  const Pass pass = pass_of(p, workspace);
  if (pass.g_dh || pass.sums || p.dresidual)
    if (const int status = over_elements(p, pass, stream)) return status;
  if (const int status = sum_over_rows(p, pass, stream)) return status;
  if (p.dx)
    if (const int status = Products::by_weights(p, dh, memory, stream)) return status;
  if (p.dw)
    if (const int status = Products::by_inputs(p, dh, p.dw, memory, stream)) return status;
  return p.dup ? Products::by_inputs(p, dh.du(), p.dup, memory, stream) : int(QF_OK);
}

}  // namespace linear_bwd
}  // namespace qf
