// The pybind11 module: launch trampolines and the CPU engine's switches. No kernel knowledge.

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "exceptions.h"
#include "params.h"
#include "qflash.h"
#include "unlocked.h"

namespace py = pybind11;

void bind_op_calls(py::module_& module, py::dict& entries);
void bind_xla_ffi(py::module_& module);

namespace {

using qflash::raise_status;
using qflash::StatusText;

QfTensor tensor_like(const py::tuple& strides) {
  return {nullptr, strides[0].cast<int64_t>(), strides[1].cast<int64_t>(), strides[2].cast<int64_t>()};
}

// Everything of the struct that a qflash.problem.Problem fixes; pointers stay null.
QfAttnParams params_of(const py::object& problem) {
  auto integer = [&](const char* name) { return problem.attr(name).cast<int32_t>(); };
  QfAttnParams p{};
  p.struct_bytes = sizeof(QfAttnParams);
  const auto dtype = problem.attr("dtype").cast<std::string>();
  p.dtype = dtype == "float32" ? QF_F32 : dtype == "float16" ? QF_F16 : QF_BF16;
  const auto precision = problem.attr("precision").cast<std::string>();
  p.precision = precision == "int8" ? QF_INT8 : precision == "int8_fp8" ? QF_INT8_FP8 : QF_NATIVE;
  p.batch = integer("batch");
  p.q_len = integer("q_len");
  p.k_len = integer("k_len");
  p.q_heads = integer("q_heads");
  p.kv_heads = integer("kv_heads");
  p.head_dim = integer("head_dim");
  p.window_left = integer("window_left");
  p.window_right = integer("window_right");
  p.scale = problem.attr("scale").cast<float>();
  p.softcap = problem.attr("softcap").cast<float>();
  p.q = tensor_like(problem.attr("q_strides"));
  p.k = tensor_like(problem.attr("k_strides"));
  p.v = tensor_like(problem.attr("v_strides"));
  const bool packed = problem.attr("packed").cast<bool>();
  p.total_q = problem.attr("total_q").cast<int64_t>();
  p.total_k = problem.attr("total_k").cast<int64_t>();
  qflash::set_result_strides(p, packed);
  p.rope.rows = integer("rope_rows");
  p.rope.rotary_dim = integer("rotary_dim");
  p.rope.interleaved = problem.attr("rope_interleaved").cast<bool>();
  auto stride_or_zero = [&](const char* name) {
    const py::object stride = problem.attr(name);
    return stride.is_none() ? int64_t(0) : stride.cast<int64_t>();
  };
  p.rope.stride_positions_q_b = stride_or_zero("positions_q_stride");
  p.rope.stride_positions_k_b = stride_or_zero("positions_k_stride");
  return p;
}

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The address arguments shared by the forward and the backward trampoline.
struct Addresses {
  uintptr_t q, k, v, out, lse, kv_lens, cu_seqlens_q, cu_seqlens_k, cos, sin, positions_q, positions_k;
};

void set_addresses(QfAttnParams& p, const Addresses& a) {
  p.q.data = pointer<void>(a.q);
  p.k.data = pointer<void>(a.k);
  p.v.data = pointer<void>(a.v);
  p.out.data = pointer<void>(a.out);
  p.lse = pointer<float>(a.lse);
  p.kv_lens = pointer<const int32_t>(a.kv_lens);
  p.cu_seqlens_q = pointer<const int32_t>(a.cu_seqlens_q);
  p.cu_seqlens_k = pointer<const int32_t>(a.cu_seqlens_k);
  p.rope.cos = pointer<const float>(a.cos);
  p.rope.sin = pointer<const float>(a.sin);
  p.rope.positions_q = pointer<const int32_t>(a.positions_q);
  p.rope.positions_k = pointer<const int32_t>(a.positions_k);
}

// A prepared forward call: the struct with everything but addresses. Immutable, so threads share it.
class AttnCall {
 public:
  AttnCall(const py::object& problem, uintptr_t entry, uintptr_t status_text, uintptr_t workspace)
      : params_(params_of(problem)),
        entry_(reinterpret_cast<qflash::AttnEntry>(entry)),
        text_(reinterpret_cast<StatusText>(status_text)) {
    if (workspace) workspace_bytes_ = reinterpret_cast<qflash::WorkspaceBytes>(workspace)(&params_);
  }

  int64_t workspace_bytes() const { return workspace_bytes_; }

  void operator()(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse, uintptr_t kv_lens,
                  uintptr_t cu_seqlens_q, uintptr_t cu_seqlens_k, uintptr_t cos, uintptr_t sin, uintptr_t positions_q,
                  uintptr_t positions_k, uintptr_t workspace, uintptr_t stream, int32_t num_threads) const {
    QfAttnParams p = params_;
    set_addresses(p, {q, k, v, out, lse, kv_lens, cu_seqlens_q, cu_seqlens_k, cos, sin, positions_q, positions_k});
    p.workspace = pointer<void>(workspace);
    p.workspace_bytes = workspace_bytes_;
    p.num_threads = num_threads;
    const int status = qflash::run_unlocked([&] { return entry_(&p, pointer<void>(stream)); });
    if (status != QF_OK) raise_status(status, text_);
  }

 private:
  QfAttnParams params_;
  qflash::AttnEntry entry_;
  StatusText text_;
  int64_t workspace_bytes_ = 0;
};

// A prepared backward call. Gradients and dout are contiguous.
class AttnBwdCall {
 public:
  AttnBwdCall(const py::object& problem, uintptr_t entry, uintptr_t status_text)
      : entry_(reinterpret_cast<qflash::AttnBwdEntry>(entry)), text_(reinterpret_cast<StatusText>(status_text)) {
    params_.fwd = params_of(problem);
    qflash::set_gradient_strides(params_, problem.attr("packed").cast<bool>());
  }

  void operator()(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse, uintptr_t kv_lens,
                  uintptr_t cu_seqlens_q, uintptr_t cu_seqlens_k, uintptr_t cos, uintptr_t sin, uintptr_t positions_q,
                  uintptr_t positions_k, uintptr_t dout, uintptr_t dlse, uintptr_t dq, uintptr_t dk, uintptr_t dv,
                  uintptr_t stream, int32_t num_threads) const {
    QfAttnBwdParams p = params_;
    set_addresses(p.fwd, {q, k, v, out, lse, kv_lens, cu_seqlens_q, cu_seqlens_k, cos, sin, positions_q, positions_k});
    p.fwd.num_threads = num_threads;
    p.dout.data = pointer<void>(dout);
    p.dlse = pointer<const float>(dlse);
    p.dq.data = pointer<void>(dq);
    p.dk.data = pointer<void>(dk);
    p.dv.data = pointer<void>(dv);
    const int status = qflash::run_unlocked([&] { return entry_(&p, pointer<void>(stream)); });
    if (status != QF_OK) raise_status(status, text_);
  }

 private:
  QfAttnBwdParams params_{};
  qflash::AttnBwdEntry entry_;
  StatusText text_;
};

template <class F>
uintptr_t address(F* function) {
  return reinterpret_cast<uintptr_t>(function);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "qflash's compiled half: launch trampolines, CPU engine, XLA handlers";
  module.attr("ABI") = QF_ABI;

  py::class_<AttnCall>(module, "AttnCall")
      .def(py::init<const py::object&, uintptr_t, uintptr_t, uintptr_t>(), py::arg("problem"), py::arg("entry"),
           py::arg("status_text"), py::arg("workspace"))
      .def_property_readonly("workspace_bytes", &AttnCall::workspace_bytes)
      .def("__call__", &AttnCall::operator());
  py::class_<AttnBwdCall>(module, "AttnBwdCall")
      .def(py::init<const py::object&, uintptr_t, uintptr_t>(), py::arg("problem"), py::arg("entry"),
           py::arg("status_text"))
      .def("__call__", &AttnBwdCall::operator());

  // Entry addresses of the CPU kernels by name, and of the text behind their statuses.
  py::dict entries;
  entries["cpu"] = address(&qf_cpu);
  entries["cpu_bwd"] = address(&qf_cpu_bwd);
  entries["cpu_int8"] = address(&qf_cpu_int8);
  entries["status_text"] = address(&qf_cpu_status_text);
  bind_op_calls(module, entries);
  module.attr("cpu_entries") = entries;

  module.def("cpu_isa", &qf_cpu_isa, "Instruction set the CPU engine runs: amx, avx512, avx2 or generic.");
  module.def("get_num_threads", &qf_cpu_default_threads);
  module.def("set_num_threads", [](int32_t n) {
    if (n < 1) throw py::value_error("num_threads is " + std::to_string(n) + "; allowed: 1 or more");
    qf_cpu_set_default_threads(n);
  });

  bind_xla_ffi(module);
}
