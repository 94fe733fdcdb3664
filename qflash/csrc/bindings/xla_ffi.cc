// XLA FFI handlers of attention: JAX's way to the same entries the other front ends call. Built where jaxlib's headers
// are found.

#include <pybind11/pybind11.h>

namespace py = pybind11;

#ifdef QF_WITH_XLA

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>

#include "params.h"
#include "qflash.h"
#include "xla_registry.h"

namespace ffi = xla::ffi;

void bind_xla_call(py::list& targets);
void bind_xla_ops(py::list& targets);

namespace {

using qflash::capsule_of;
using qflash::error_of;
using qflash::guarded;
using qflash::KernelAddresses;
using qflash::registry;

// Bits of the `operands` attribute: which optional arrays follow the fixed ones, in this order.
enum Operand : int64_t {
  kKvLens = 1,
  kRope = 2,  // cos and sin
  kPositionsQ = 4,
  kPositionsK = 8,
  kPacked = 16,  // cu_seqlens_q and cu_seqlens_k
  kDlse = 32,    // backward only
};

struct Attributes {
  std::string_view kernel;  // registry key
  float scale, softcap;
  int64_t precision, window_left, window_right;
  int64_t max_seqlen_q, max_seqlen_k;  // packed only
  int64_t operands;
  bool interleaved;
};

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Attributes, StructMember<std::string_view>("kernel"),
                                      StructMember<float>("scale"), StructMember<float>("softcap"),
                                      StructMember<int64_t>("precision"), StructMember<int64_t>("window_left"),
                                      StructMember<int64_t>("window_right"), StructMember<int64_t>("max_seqlen_q"),
                                      StructMember<int64_t>("max_seqlen_k"), StructMember<int64_t>("operands"),
                                      StructMember<bool>("interleaved"));

namespace {

std::string text_of(ffi::AnyBuffer::Dimensions dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

[[noreturn]] void refuse(const std::string& name, ffi::AnyBuffer buffer, const std::string& allowed) {
  throw std::invalid_argument(name + " has shape " + text_of(buffer.dimensions()) + " and XLA element type " +
                              std::to_string(static_cast<int>(buffer.element_type())) + "; allowed: " + allowed);
}

int32_t extent(const char* name, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; allowed: 0 to 2^31 - 1");
  return static_cast<int32_t>(value);
}

bool has_shape(ffi::AnyBuffer buffer, std::initializer_list<int64_t> shape) {
  const auto dims = buffer.dimensions();
  if (dims.size() != shape.size()) return false;
  return std::equal(shape.begin(), shape.end(), dims.begin());
}

// The optional operands, taken one after another.
class Remaining {
 public:
  explicit Remaining(const ffi::RemainingArgs& args) : args_(args) {}

  ffi::AnyBuffer next(const char* name) {
    auto buffer = args_.get<ffi::AnyBuffer>(used_++);
    if (!buffer.has_value()) throw std::invalid_argument(std::string("operand ") + name + " is missing");
    return *buffer;
  }

  const int32_t* next_index(const char* name, std::initializer_list<int64_t> shape) {
    const ffi::AnyBuffer buffer = next(name);
    if (buffer.element_type() != ffi::S32 || !has_shape(buffer, shape)) refuse(name, buffer, "int32, one per entry");
    return static_cast<const int32_t*>(buffer.untyped_data());
  }

  void finish() const {
    if (used_ != args_.size())
      throw std::invalid_argument(std::to_string(args_.size() - used_) + " more operands than `operands` names");
  }

 private:
  const ffi::RemainingArgs& args_;
  size_t used_ = 0;
};

int32_t dtype_of(ffi::AnyBuffer q) {
  switch (q.element_type()) {
    case ffi::F32:
      return QF_F32;
    case ffi::F16:
      return QF_F16;
    case ffi::BF16:
      return QF_BF16;
    default:
      refuse("q", q, "float32, float16 or bfloat16");
  }
}

// Everything but the optional operands and results. XLA hands over contiguous arrays.
QfAttnParams params_of(const Attributes& a, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v) {
  const bool packed = a.operands & kPacked;
  const size_t rank = packed ? 3 : 4;
  if (q.dimensions().size() != rank) refuse("q", q, "rank " + std::to_string(rank));
  if (k.dimensions().size() != rank) refuse("k", k, "rank " + std::to_string(rank));
  const auto dq = q.dimensions(), dk = k.dimensions(), dv = v.dimensions();
  if (k.element_type() != q.element_type()) refuse("k", k, "q's element type");
  if (v.element_type() != q.element_type() || dv.size() != rank || !std::equal(dk.begin(), dk.end(), dv.begin()))
    refuse("v", v, "as k");

  QfAttnParams p{};
  p.struct_bytes = sizeof(QfAttnParams);
  p.dtype = dtype_of(q);
  p.precision = extent("precision", a.precision);
  p.q_heads = extent("q's heads", dq[rank - 2]);
  p.kv_heads = extent("k's heads", dk[rank - 2]);
  p.head_dim = extent("q's head_dim", dq[rank - 1]);
  if (p.head_dim < 1 || dk[rank - 1] != p.head_dim) refuse("k", k, "q's head_dim");
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads) refuse("k", k, "heads that divide q's");
  if (packed) {
    p.total_q = extent("q's rows", dq[0]);
    p.total_k = extent("k's rows", dk[0]);
    // Bounds, which a program with symbolic totals may have above them.
    p.q_len = std::min<int64_t>(extent("max_seqlen_q", a.max_seqlen_q), p.total_q);
    p.k_len = std::min<int64_t>(extent("max_seqlen_k", a.max_seqlen_k), p.total_k);
  } else {
    p.batch = extent("q's batch size", dq[0]);
    p.q_len = extent("q's length", dq[1]);
    p.k_len = extent("k's length", dk[1]);
    if (dk[0] != p.batch) refuse("k", k, "q's batch size");
  }
  p.window_left = static_cast<int32_t>(a.window_left);
  p.window_right = static_cast<int32_t>(a.window_right);
  p.scale = a.scale;
  p.softcap = a.softcap;
  p.q = qflash::contiguous(packed, p.q_len, p.q_heads, p.head_dim);
  p.kv.kind = QF_KV_ARRAYS;
  p.kv.k_dtype = p.kv.v_dtype = p.dtype;
  p.kv.k = p.kv.v = qflash::contiguous(packed, p.k_len, p.kv_heads, p.head_dim);
  p.q.data = q.untyped_data();
  p.kv.k.data = k.untyped_data();
  p.kv.v.data = v.untyped_data();
  qflash::set_result_strides(p, packed);
  return p;
}

// Positions stand as [length] for every sequence alike, or [batch, length]; packed ones only as [total].
const int32_t* take_positions(Remaining& rest, const char* name, const QfAttnParams& p, bool packed, int64_t length,
                              int64_t& stride_b) {
  const ffi::AnyBuffer buffer = rest.next(name);
  const bool shared = has_shape(buffer, {length});
  if (buffer.element_type() != ffi::S32 || !(shared || (!packed && has_shape(buffer, {p.batch, length}))))
    refuse(name, buffer, "int32, one per row");
  stride_b = shared ? 0 : length;
  return static_cast<const int32_t*>(buffer.untyped_data());
}

void take_optional(QfAttnParams& p, const Attributes& a, Remaining& rest) {
  const bool packed = a.operands & kPacked;
  if (packed) {
    const ffi::AnyBuffer cu_q = rest.next("cu_seqlens_q");
    if (cu_q.element_type() != ffi::S32 || cu_q.dimensions().size() != 1 || cu_q.dimensions()[0] < 1)
      refuse("cu_seqlens_q", cu_q, "int32 [batch + 1]");
    p.batch = extent("cu_seqlens_q's size", cu_q.dimensions()[0] - 1);
    p.cu_seqlens_q = static_cast<const int32_t*>(cu_q.untyped_data());
    p.cu_seqlens_k = rest.next_index("cu_seqlens_k", {p.batch + 1});
  }
  if (a.operands & kKvLens) p.kv_lens = rest.next_index("kv_lens", {p.batch});
  if (a.operands & kRope) {
    const ffi::AnyBuffer cos = rest.next("rope.cos"), sin = rest.next("rope.sin");
    const auto dims = cos.dimensions();
    if (cos.element_type() != ffi::F32 || dims.size() != 2 || dims[0] < 1 || dims[1] < 1 || 2 * dims[1] > p.head_dim)
      refuse("rope.cos", cos, "float32 [positions, at most head_dim / 2]");
    if (sin.element_type() != ffi::F32 || !has_shape(sin, {dims[0], dims[1]})) refuse("rope.sin", sin, "as rope.cos");
    p.rope.cos = static_cast<const float*>(cos.untyped_data());
    p.rope.sin = static_cast<const float*>(sin.untyped_data());
    p.rope.rows = extent("rope.cos's rows", dims[0]);
    p.rope.rotary_dim = static_cast<int32_t>(2 * dims[1]);
    p.rope.interleaved = a.interleaved;
  }
  if (a.operands & kPositionsQ)
    p.rope.positions_q =
        take_positions(rest, "rope.positions_q", p, packed, packed ? p.total_q : p.q_len, p.rope.stride_positions_q_b);
  if (a.operands & kPositionsK)
    p.rope.positions_k =
        take_positions(rest, "rope.positions_k", p, packed, packed ? p.total_k : p.k_len, p.rope.stride_positions_k_b);
}

// `like` is the operand whose shape and element type an array must have.
void* data_like(const char* name, ffi::AnyBuffer buffer, ffi::AnyBuffer like) {
  const auto dims = like.dimensions();
  if (buffer.element_type() != like.element_type() || buffer.dimensions().size() != dims.size() ||
      !std::equal(dims.begin(), dims.end(), buffer.dimensions().begin()))
    refuse(name, buffer, "shape and type of the array it belongs to, " + text_of(dims));
  return buffer.untyped_data();
}

float* lse_data(const char* name, ffi::AnyBuffer buffer, const QfAttnParams& p, bool packed) {
  const bool fits =
      packed ? has_shape(buffer, {p.q_heads, p.total_q}) : has_shape(buffer, {p.batch, p.q_heads, p.q_len});
  if (buffer.element_type() != ffi::F32 || !fits) refuse(name, buffer, "float32 [batch, q_heads, q_len]");
  return static_cast<float*>(buffer.untyped_data());
}

ffi::Error forward(void* stream, const Attributes& a, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                   const ffi::RemainingArgs& optional, ffi::AnyBuffer out, ffi::AnyBuffer lse,
                   ffi::AnyBuffer workspace) {
  return guarded([&] {
    const KernelAddresses kernel = registry().get(a.kernel, "QfAttnParams");
    QfAttnParams p = params_of(a, q, k, v);
    Remaining rest(optional);
    take_optional(p, a, rest);
    rest.finish();
    p.out.data = data_like("out", out, q);
    p.lse = lse_data("lse", lse, p, a.operands & kPacked);
    if (kernel.workspace) {
      // The workspace is a result of the custom call, not scratch memory taken here: a command buffer replays the
      // launch with the same addresses, and only buffers XLA knows of are still ours by then.
      const int64_t needed = reinterpret_cast<qflash::WorkspaceBytes>(kernel.workspace)(&p);
      if (needed > static_cast<int64_t>(workspace.size_bytes()))
        throw std::invalid_argument("this program was lowered with a workspace of " +
                                    std::to_string(workspace.size_bytes()) + " bytes, kernel " + std::string(a.kernel) +
                                    " needs " + std::to_string(needed) + " here: lower it again");
      p.workspace = workspace.untyped_data();
      p.workspace_bytes = needed;
    }
    return error_of(reinterpret_cast<qflash::AttnEntry>(kernel.entry)(&p, stream), kernel.status_text);
  });
}

ffi::Error forward_cpu(const Attributes& a, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                       ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                       ffi::Result<ffi::AnyBuffer> workspace) {
  return forward(nullptr, a, q, k, v, optional, *out, *lse, *workspace);
}

ffi::Error forward_cuda(cudaStream_t stream, const Attributes& a, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                        ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                        ffi::Result<ffi::AnyBuffer> workspace) {
  return forward(stream, a, q, k, v, optional, *out, *lse, *workspace);
}

ffi::Error backward_cpu(const Attributes& a, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer out,
                        ffi::AnyBuffer lse, ffi::AnyBuffer dout, ffi::RemainingArgs optional,
                        ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                        ffi::Result<ffi::AnyBuffer> dv) {
  return guarded([&] {
    const KernelAddresses kernel = registry().get(a.kernel, "QfAttnBwdParams");
    const bool packed = a.operands & kPacked;
    QfAttnBwdParams p{};
    p.struct_bytes = sizeof p;
    p.fwd = params_of(a, q, k, v);
    Remaining rest(optional);
    take_optional(p.fwd, a, rest);
    if (a.operands & kDlse) p.dlse = lse_data("dlse", rest.next("dlse"), p.fwd, packed);
    rest.finish();
    qflash::set_gradient_strides(p, packed);
    p.fwd.out.data = data_like("out", out, q);
    p.fwd.lse = lse_data("lse", lse, p.fwd, packed);
    p.dout.data = data_like("dout", dout, q);
    p.dq.data = data_like("dq", *dq, q);
    p.dk.data = data_like("dk", *dk, k);
    p.dv.data = data_like("dv", *dv, v);
    return error_of(reinterpret_cast<qflash::AttnBwdEntry>(kernel.entry)(&p, nullptr), kernel.status_text);
  });
}

XLA_FFI_DEFINE_HANDLER(kForwardCpu, forward_cpu,
                       ffi::Ffi::Bind()
                           .Attrs<Attributes>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kForwardCuda, forward_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Attrs<Attributes>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kBackwardCpu, backward_cpu,
                       ffi::Ffi::Bind()
                           .Attrs<Attributes>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

void bind_xla_ffi(py::module_& module) {
  module.def(
      "xla_targets",
      [] {
        py::list targets;  // (name, XLA platform, handler)
        targets.append(py::make_tuple("qflash_attention", "cpu", capsule_of(kForwardCpu)));
        targets.append(py::make_tuple("qflash_attention", "CUDA", capsule_of(kForwardCuda)));
        targets.append(py::make_tuple("qflash_attention_bwd", "cpu", capsule_of(kBackwardCpu)));
        bind_xla_call(targets);
        bind_xla_ops(targets);
        return targets;
      },
      "The XLA FFI handlers to register.");
  py::dict bits;
  bits["kv_lens"] = int64_t(kKvLens);
  bits["rope"] = int64_t(kRope);
  bits["positions_q"] = int64_t(kPositionsQ);
  bits["positions_k"] = int64_t(kPositionsK);
  bits["packed"] = int64_t(kPacked);
  bits["dlse"] = int64_t(kDlse);
  module.attr("xla_operands") = bits;
  py::dict precisions;
  precisions["native"] = int64_t(QF_NATIVE);
  precisions["int8"] = int64_t(QF_INT8);
  precisions["int8_fp8"] = int64_t(QF_INT8_FP8);
  module.attr("xla_precisions") = precisions;
  module.def(
      "register_xla_kernel",
      [](const std::string& key, uintptr_t entry, uintptr_t status_text, uintptr_t workspace,
         const std::string& takes) { registry().add(key, {entry, status_text, workspace, takes}); },
      py::arg("key"), py::arg("entry"), py::arg("status_text"), py::arg("workspace"), py::arg("takes"));
  module.def(
      "set_xla_resolver", [](py::object resolver) { registry().set_resolver(std::move(resolver)); },
      "Called with a key the registry does not know; it must register it or raise.");
}

#else

void bind_xla_ffi(py::module_&) {}

#endif  // QF_WITH_XLA
