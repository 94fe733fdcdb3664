// qf_cpu_int8_quantized: attention on arrays that are INT8 already, the plain way: q, k and v back to float32, then the
// engine's own attention. It is the definition that `fa_int8_quantized` is an optimisation of.
#include "int8_quantized.h"

#include <memory>
#include <new>

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

int check(const QfInt8AttnParams& p) {
  if (p.struct_bytes != int32_t(sizeof p)) return QF_BAD_ABI;
  if (p.attn.cu_seqlens_q || p.attn.rope.cos || p.lift)
    return fail(QF_UNSUPPORTED, "kernel 'cpu_int8_quantized' takes no packed sequences, rope or lift");
  return QF_OK;
}

class Int8Quantized {
 public:
  Int8Quantized(const QfInt8AttnParams& p, Isa isa) : p_(p), a_(p.attn), isa_(isa) {}

  int run() const {
    Copy q(a_.batch, a_.q_len, a_.q_heads, a_.head_dim), out(a_.batch, a_.q_len, a_.q_heads, a_.head_dim);
    Copy k(a_.batch, a_.k_len, a_.kv_heads, a_.head_dim), v(a_.batch, a_.k_len, a_.kv_heads, a_.head_dim);
    if (int status = dequantize(a_.q, p_.q_scales, nullptr, a_.q_len, a_.q_heads, q.tensor)) return status;
    if (int status = dequantize(a_.k, p_.k_scales, p_.k_mean, a_.k_len, a_.kv_heads, k.tensor)) return status;
    if (p_.v_scales.scale) {
      if (int status = dequantize(a_.v, p_.v_scales, nullptr, a_.k_len, a_.kv_heads, v.tensor)) return status;
    } else {
      if (int status = each_row(a_.v, v.tensor, a_.k_len, a_.kv_heads,
                                [this](char* x, float* y) { QF_PICK(isa_, widen_row)(y, x, a_.dtype, a_.head_dim); }))
        return status;
    }
    QfAttnParams plain = a_;
    plain.dtype = QF_F32, plain.precision = QF_NATIVE;
    plain.q = q.tensor, plain.k = k.tensor, plain.v = v.tensor, plain.out = out.tensor;
    if (int status = qf_cpu(&plain, nullptr)) return status;
    return each_row(a_.out, out.tensor, a_.q_len, a_.q_heads,
                    [this](char* x, float* y) { QF_PICK(isa_, narrow_row)(x, y, a_.dtype, a_.head_dim); });
  }

 private:
  int dequantize(const QfTensor& values, const QfScales& scales, const float* mean, int32_t length, int32_t heads,
                 const QfTensor& to) const {
    QfDequantizeParams x{};
    x.struct_bytes = sizeof x;
    x.dtype = QF_F32;
    x.batch = a_.batch, x.length = length, x.heads = heads, x.head_dim = a_.head_dim;
    const bool one = scales.stride_b == 0 && scales.stride_h == 0;
    const int64_t groups = one ? 1 : ceil_div(length, scales.group);
    if (!one && (scales.stride_h != groups || scales.stride_b != heads * groups))
      return fail(QF_UNSUPPORTED, "scales are not contiguous; allowed: [batch, heads, groups], or one");
    x.granularity = one ? QF_PER_TENSOR : QF_PER_ROWS;
    x.group = one ? 1 : scales.group;
    x.symmetric = scales.zero_point == nullptr;
    x.num_threads = a_.num_threads;
    x.values = values, x.out = to;
    x.scale = scales.scale, x.zero_point = scales.zero_point, x.mean = mean;
    return qf_cpu_dequantize(&x, nullptr);
  }

  // work(row of x, which has a_.dtype; the same row of y, float32), for every one.
  template <class Work>
  int each_row(const QfTensor& x, const QfTensor& y, int64_t length, int64_t heads, Work work) const {
    const int64_t bytes = a_.dtype == QF_F32 ? 4 : 2;
    auto one = [&](int64_t item) {
      const int64_t b = item / length, t = item % length;
      for (int64_t h = 0; h < heads; h++)
        work(static_cast<char*>(x.data) + (b * x.stride_b + t * x.stride_t + h * x.stride_h) * bytes,
             static_cast<float*>(y.data) + b * y.stride_b + t * y.stride_t + h * y.stride_h);
      return int(QF_OK);
    };
    return parallel_for(a_.batch * length, a_.num_threads, one);
  }

  const QfInt8AttnParams& p_;
  const QfAttnParams& a_;
  const Isa isa_;
};

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_int8_quantized(const QfInt8AttnParams* params, void*) {
  if (int status = qf::check(*params)) return status;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  try {
    return qf::Int8Quantized(*params, isa).run();
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}
