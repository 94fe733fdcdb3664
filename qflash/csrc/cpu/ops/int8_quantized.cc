// qf_cpu_int8 on arrays that are INT8 already, done directly: q, k and v back to float32, then the engine's own
// attention. `fa_int8` with QF_KV_QUANTIZED is an optimisation of this definition.
#include "int8_quantized.h"

#include <memory>

#include "qflash_ops.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

// Float32, contiguous, not initialised.
struct Copy {
  std::unique_ptr<float[]> memory;
  QfTensor tensor;

  Copy(int64_t batch, int64_t length, int64_t heads, int64_t head_dim)
      : memory(new float[size_t(batch * length * heads * head_dim)]),
        tensor{memory.get(), length * heads * head_dim, heads * head_dim, head_dim} {}
};

int check(const QfAttnParams& p) {
  if (p.cu_seqlens_q || p.rope.cos || p.q_dot_mean)
    return fail(QF_UNSUPPORTED, "kernel 'cpu_int8' takes no packed sequences, rope or q_dot_mean with arrays in INT8");
  const int32_t of_v = p.kv.v_scales.scale ? int32_t(QF_I8) : p.dtype;
  if (p.kv.k_dtype != QF_I8 || p.kv.v_dtype != of_v || !p.q_scales.scale || !p.kv.k_scales.scale)
    return fail(QF_UNSUPPORTED, "k and v have dtypes %d and %d; allowed: %d and %d, with scales of q and k",
                p.kv.k_dtype, p.kv.v_dtype, QF_I8, of_v);
  return QF_OK;
}

class Int8Quantized {
 public:
  Int8Quantized(const QfAttnParams& p, Isa isa) : p_(p), isa_(isa) {}

  int run() const {
    Copy q(p_.batch, p_.q_len, p_.q_heads, p_.head_dim), out(p_.batch, p_.q_len, p_.q_heads, p_.head_dim);
    Copy k(p_.batch, p_.k_len, p_.kv_heads, p_.head_dim), v(p_.batch, p_.k_len, p_.kv_heads, p_.head_dim);
    if (int status = dequantize(p_.q, p_.q_scales, nullptr, p_.q_len, p_.q_heads, q.tensor)) return status;
    if (int status = dequantize(p_.kv.k, p_.kv.k_scales, p_.kv.k_mean, p_.k_len, p_.kv_heads, k.tensor)) return status;
    if (p_.kv.v_scales.scale) {
      if (int status = dequantize(p_.kv.v, p_.kv.v_scales, nullptr, p_.k_len, p_.kv_heads, v.tensor)) return status;
    } else {
      if (int status = each_row(p_.kv.v, v.tensor, p_.k_len, p_.kv_heads,
                                [this](char* x, float* y) { QF_PICK(isa_, widen_row)(y, x, p_.dtype, p_.head_dim); }))
        return status;
    }
    QfAttnParams plain = p_;
    plain.dtype = QF_F32, plain.precision = QF_NATIVE;
    plain.q = q.tensor, plain.out = out.tensor;
    plain.kv = {};
    plain.kv.kind = QF_KV_ARRAYS, plain.kv.k_dtype = plain.kv.v_dtype = QF_F32;
    plain.kv.k = k.tensor, plain.kv.v = v.tensor;
    if (int status = qf_cpu(&plain, nullptr)) return status;
    return each_row(p_.out, out.tensor, p_.q_len, p_.q_heads,
                    [this](char* x, float* y) { QF_PICK(isa_, narrow_row)(x, y, p_.dtype, p_.head_dim); });
  }

 private:
  int dequantize(const QfTensor& values, const QfScales& scales, const float* mean, int32_t length, int32_t heads,
                 const QfTensor& to) const {
    QfDequantizeParams x{};
    x.struct_bytes = sizeof x;
    x.dtype = QF_F32;
    x.batch = p_.batch, x.length = length, x.heads = heads, x.head_dim = p_.head_dim;
    const bool one = scales.stride_b == 0 && scales.stride_h == 0;
    const int64_t groups = one ? 1 : ceil_div(length, scales.group);
    if (!one && (scales.stride_h != groups || scales.stride_b != heads * groups))
      return fail(QF_UNSUPPORTED, "scales are not contiguous; allowed: [batch, heads, groups], or one");
    x.granularity = one ? QF_PER_TENSOR : QF_PER_GROUP;
    x.group = one ? 1 : scales.group;
    x.symmetric = scales.zero_point == nullptr;
    x.num_threads = p_.num_threads;
    x.values = values, x.out = to;
    x.scale = scales.scale, x.zero_point = scales.zero_point, x.mean = mean;
    return qf_cpu_dequantize(&x, nullptr);
  }

  // work(row of x, which has p_.dtype; the same row of y, float32), for every one.
  template <class Work>
  int each_row(const QfTensor& x, const QfTensor& y, int64_t length, int64_t heads, Work work) const {
    const int64_t bytes = p_.dtype == QF_F32 ? 4 : 2;
    auto one = [&](int64_t task) {
      const int64_t b = task / length, t = task % length;
      for (int64_t h = 0; h < heads; h++)
        work(static_cast<char*>(x.data) + (b * x.stride_b + t * x.stride_t + h * x.stride_h) * bytes,
             static_cast<float*>(y.data) + b * y.stride_b + t * y.stride_t + h * y.stride_h);
      return int(QF_OK);
    };
    return parallel_for(p_.batch * length, p_.num_threads, one);
  }

  const QfAttnParams& p_;
  const Isa isa_;
};

}  // namespace

int attend_quantized(const QfAttnParams& p, Isa isa) {
  if (int status = check(p)) return status;
  return Int8Quantized(p, isa).run();
}

}  // namespace qf
