// The pybind11 module: launch trampolines and the CPU engine's settings. No kernel-specific code.

#include <pybind11/pybind11.h>

#include <string>

#include "qflash_ops.h"

namespace py = pybind11;

void bind_call(py::module_& module);
void bind_cubins(py::module_& module);
void bind_plan_key(py::module_& module);
void bind_xla_call(py::module_& module);

// The address of qf_<name> under its name.
#define QF_ADD_ENTRY(name) entries[#name] = reinterpret_cast<uintptr_t>(&qf_##name)

// These two are public without a wrapper, so they have docstrings with an example like all public names.
constexpr char kGetNumThreads[] = R"(How many threads a call on the CPU uses: by default, one for every core it may use.

Example:
    >>> import qflash
    >>> qflash.get_num_threads() >= 1
    True
)";
constexpr char kSetNumThreads[] =
    R"(Let calls on the CPU use `num_threads` threads, 1 or more. It holds for the process.

Example:
    >>> import qflash
    >>> before = qflash.get_num_threads()
    >>> qflash.set_num_threads(1)
    >>> qflash.get_num_threads()
    1
    >>> qflash.set_num_threads(before)
)";

PYBIND11_MODULE(_native, module) {
  module.doc() = "qflash's compiled half: launch trampolines, CPU engine, XLA handlers";

  // Addresses of the CPU kernels' entries by name, and of the function that returns their status texts.
  py::dict entries;
  QF_ADD_ENTRY(cpu);
  QF_ADD_ENTRY(cpu_bwd);
  QF_ADD_ENTRY(cpu_int8);
  QF_ADD_ENTRY(cpu_softmax);
  QF_ADD_ENTRY(cpu_softmax_bwd);
  QF_ADD_ENTRY(cpu_layer_norm);
  QF_ADD_ENTRY(cpu_layer_norm_bwd);
  QF_ADD_ENTRY(cpu_cross_entropy);
  QF_ADD_ENTRY(cpu_cross_entropy_bwd);
  QF_ADD_ENTRY(cpu_linear);
  QF_ADD_ENTRY(cpu_linear_bwd);
  QF_ADD_ENTRY(cpu_int8_matmul);
  QF_ADD_ENTRY(cpu_quantize);
  QF_ADD_ENTRY(cpu_dequantize);
  QF_ADD_ENTRY(cpu_kv_write);
  QF_ADD_ENTRY(cpu_merge);
  QF_ADD_ENTRY(cpu_rope);
  entries["status_text"] = reinterpret_cast<uintptr_t>(&qf_cpu_status_text);
  module.attr("cpu_entries") = entries;

  module.def("cpu_isa", &qf_cpu_isa, "Instruction set the CPU engine runs: amx, avx512, avx2 or generic.");
  module.def("get_num_threads", &qf_cpu_default_threads, kGetNumThreads);
  module.def(
      "set_num_threads",
      [](int32_t n) {
        if (n < 1) throw py::value_error("num_threads is " + std::to_string(n) + "; allowed: 1 or more");
        qf_cpu_set_default_threads(n);
      },
      kSetNumThreads);

  bind_call(module);
  bind_cubins(module);
  bind_plan_key(module);
  bind_xla_call(module);
}
