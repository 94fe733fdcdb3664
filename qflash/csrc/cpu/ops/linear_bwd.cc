// qf_cpu_linear_bwd: the gradients of the activation, strip by strip, then products as in linear layers: dx of w
// transposed, dw of x transposed. Strips depend on the shape alone, so sums over rows have one order.
#include "linear_bwd.h"

#include <algorithm>

#include "linear.h"
#include "memory.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

int check(const QfLinearBwdParams& p) {
  if (p.struct_bytes != int32_t(sizeof(QfLinearBwdParams)))
    return fail(QF_BAD_ABI, "struct_bytes is %d; this library was built for %d", p.struct_bytes,
                int(sizeof(QfLinearBwdParams)));
  if (p.m < 0 || p.n < 0 || p.k < 0)
    return fail(QF_UNSUPPORTED, "m, n, k are %lld, %lld, %lld; allowed: 0 and up", static_cast<long long>(p.m),
                static_cast<long long>(p.n), static_cast<long long>(p.k));
  if (p.dtype != QF_F32 && p.dtype != QF_F16 && p.dtype != QF_BF16)
    return fail(QF_UNSUPPORTED, "dtype is %d; allowed: float32, float16, bfloat16", p.dtype);
  if (p.activation < QF_IDENTITY || p.activation > QF_SWIGLU)
    return fail(QF_UNSUPPORTED, "activation is %d; allowed: %d to %d", p.activation, QF_IDENTITY, QF_SWIGLU);
  return QF_OK;
}

// The call's memory: dh and du, then the shares of dbias and dup_bias, [row strips, n].
struct Memory {
  ProductGradients gradients = {nullptr, nullptr};
  float* sums[2] = {nullptr, nullptr};
  int64_t row_strips;

  // False: there is no memory.
  bool reserve(const QfLinearBwdParams& p) {
    row_strips = ceil_div(p.m, kStripRows);
    const int64_t matrix = p.activation == QF_IDENTITY ? 0 : round_up(p.m * p.n * (p.dtype == QF_F32 ? 4 : 2), 64);
    const int64_t shares = round_up(row_strips * p.n * 4, 64);
    char* const base = static_cast<char*>(call_scratch(size_t(2 * matrix + 2 * shares)));
    if (!base) return false;
    if (matrix) gradients.dh = base;
    if (p.activation == QF_SWIGLU) gradients.du = base + matrix;
    if (p.dbias) sums[0] = reinterpret_cast<float*>(base + 2 * matrix);
    if (p.dup_bias) sums[1] = reinterpret_cast<float*>(base + 2 * matrix + shares);
    return true;
  }
};

int differentiate_activation(const QfLinearBwdParams& p, const Memory& memory, Isa isa) {
  const int64_t column_strips = ceil_div(p.n, kStripColumns);
  const auto of_strip = QF_PICK(isa, linear_bwd_strip);
  const auto of_bias = QF_PICK(isa, linear_bwd_bias);
  auto strip = [&](int64_t task) {
    const int64_t part = task / column_strips, column = task % column_strips * kStripColumns;
    const Strip strip = {part * kStripRows, column, int(std::min<int64_t>(kStripRows, p.m - part * kStripRows)),
                         int(std::min<int64_t>(kStripColumns, p.n - column))};
    float* sums[2];
    for (int i = 0; i < 2; i++) sums[i] = memory.sums[i] ? memory.sums[i] + part * p.n + column : nullptr;
    of_strip(p, strip, memory.gradients, sums);
    return int(QF_OK);
  };
  auto bias = [&](int64_t task) {
    void* const results[2] = {p.dbias, p.dup_bias};
    const int64_t column = task * kStripColumns;
    const int columns = int(std::min<int64_t>(kStripColumns, p.n - column));
    for (int i = 0; i < 2; i++)
      if (results[i]) of_bias(memory.sums[i], memory.row_strips, p.n, column, columns, p.bias_dtype, results[i]);
    return int(QF_OK);
  };
  int status = QF_OK;
  if (p.activation != QF_IDENTITY || p.dbias || p.dresidual)
    status = parallel_for(memory.row_strips * column_strips, p.num_threads, strip);
  if (status == QF_OK && (p.dbias || p.dup_bias)) status = parallel_for(column_strips, p.num_threads, bias);
  return status;
}

// A product without an epilogue: `out` is [m, n] without gaps.
QfLinearParams plain_product(const QfLinearBwdParams& p, int64_t m, int64_t n, int64_t k, void* out) {
  QfLinearParams product = {};
  product.struct_bytes = int32_t(sizeof product);
  product.dtype = product.out_dtype = p.dtype;
  product.bias_dtype = QF_F32;
  product.activation = QF_IDENTITY;
  product.num_threads = p.num_threads;
  product.m = m;
  product.n = n;
  product.k = k;
  product.out = out;
  product.out_stride_m = n;
  return product;
}

// dx = dh w^T, and with SwiGLU + du up^T.
int multiply_dx(const QfLinearBwdParams& p, const void* dh, const void* du, int64_t stride, Isa isa) {
  if (!p.dx) return QF_OK;
  QfLinearParams product = plain_product(p, p.m, p.k, p.n, p.dx);
  product.x = dh;
  product.x_stride_m = stride;
  product.x_stride_k = 1;
  product.w = p.w;
  product.w_stride_k = p.w_stride_n;
  product.w_stride_n = p.w_stride_k;
  product.up = p.up;
  product.up_stride_k = p.up_stride_n;
  product.up_stride_n = p.up_stride_k;
  return run_linear({product, du}, isa);
}

// dw = x^T dh.
int multiply_dw(const QfLinearBwdParams& p, const void* dh, int64_t stride, void* dw, Isa isa) {
  if (!dw) return QF_OK;
  QfLinearParams product = plain_product(p, p.k, p.n, p.m, dw);
  product.x = p.x;
  product.x_stride_m = 1;
  product.x_stride_k = p.x_stride_m;
  product.w = dh;
  product.w_stride_k = stride;
  product.w_stride_n = 1;
  return run_linear({product, nullptr}, isa);
}

int run(const QfLinearBwdParams& p, Isa isa) {
  Memory memory;
  if (!memory.reserve(p)) return fail(QF_NO_MEMORY, "no memory for the gradients of the products");
  const bool plain = p.activation == QF_IDENTITY;
  const void* const dh = plain ? p.dout : memory.gradients.dh;
  const int64_t stride = plain ? p.dout_stride_m : p.n;
  int status = differentiate_activation(p, memory, isa);
  if (status == QF_OK) status = multiply_dx(p, dh, memory.gradients.du, stride, isa);
  if (status == QF_OK) status = multiply_dw(p, dh, stride, p.dw, isa);
  if (status == QF_OK) status = multiply_dw(p, memory.gradients.du, p.n, p.dup, isa);
  release_call_scratch();
  return status;
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_linear_bwd(const QfLinearBwdParams* params, void*) {
  if (int status = qf::check(*params)) return status;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  return qf::run(*params, isa);
}
