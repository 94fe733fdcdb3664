// Operations beside attention, for Python: layouts of their structs, entries of their CPU kernels, one trampoline.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "exceptions.h"
#include "op_layouts.h"
#include "unlocked.h"

namespace py = pybind11;

namespace {

const qflash::OpLayout& layout_named(const std::string& name) {
  const qflash::OpLayout* layout = qflash::find_op_layout(name);
  if (!layout) throw py::key_error("no operation takes a struct " + name);
  return *layout;
}

// A prepared call of any operation: its struct with everything but addresses. Immutable, so threads share it.
class OpCall {
 public:
  OpCall(const std::string& struct_name, const std::string& params, const std::vector<std::string>& pointers,
         uintptr_t entry, uintptr_t status_text, uintptr_t workspace)
      : params_(layout_named(struct_name), params.data(), params.size()),
        entry_(reinterpret_cast<qflash::OpEntry>(entry)),
        text_(reinterpret_cast<qflash::StatusText>(status_text)) {
    for (const std::string& name : pointers) {
      const qflash::OpField* field = layout_named(struct_name).find(name);
      if (!field || field->kind != 'P') throw py::key_error(struct_name + " has no pointer " + name);
      pointers_.push_back(field->offset);
    }
    if (workspace) workspace_bytes_ = reinterpret_cast<qflash::OpWorkspaceBytes>(workspace)(params_.data());
  }

  int64_t workspace_bytes() const { return workspace_bytes_; }

  // addresses in the order of `pointers`, then workspace, stream, num_threads
  void operator()(const py::args& args) const {
    const size_t count = pointers_.size();
    if (args.size() != count + 3)
      throw py::type_error("an operation with " + std::to_string(count) + " pointers was called with " +
                           std::to_string(args.size()) + " numbers; allowed: " + std::to_string(count + 3));
    const auto pointer = [&](size_t i) { return reinterpret_cast<void*>(args[i].cast<uintptr_t>()); };
    qflash::OpParams p = params_;
    for (size_t i = 0; i < count; ++i) p.set_pointer(pointers_[i], pointer(i));
    p.set_workspace(pointer(count), workspace_bytes_);
    void* stream = pointer(count + 1);
    p.set_threads(args[count + 2].cast<int32_t>());
    const int status = qflash::run_unlocked([&] { return entry_(p.data(), stream); });
    if (status != QF_OK) qflash::raise_status(status, text_);
  }

 private:
  qflash::OpParams params_;
  std::vector<size_t> pointers_;
  qflash::OpEntry entry_;
  qflash::StatusText text_;
  int64_t workspace_bytes_ = 0;
};

// {struct: (bytes, {field: (offset, kind)})}
py::dict layouts() {
  py::dict all;
  for (const qflash::OpLayout& layout : qflash::op_layouts()) {
    py::dict fields;
    for (size_t i = 0; i < layout.count; ++i) {
      const qflash::OpField& field = layout.fields[i];
      fields[field.name] = py::make_tuple(field.offset, std::string(1, field.kind));
    }
    all[layout.name] = py::make_tuple(layout.bytes, fields);
  }
  return all;
}

}  // namespace

#define QF_ADD_ENTRY(name) entries[#name] = reinterpret_cast<uintptr_t>(&qf_##name)

void bind_op_calls(py::module_& module, py::dict& entries) {
  QF_ADD_ENTRY(cpu_softmax);
  QF_ADD_ENTRY(cpu_layer_norm);
  QF_ADD_ENTRY(cpu_cross_entropy);
  QF_ADD_ENTRY(cpu_int8_matmul);
  QF_ADD_ENTRY(cpu_quantize);
  QF_ADD_ENTRY(cpu_dequantize);
  QF_ADD_ENTRY(cpu_int8_quantized);
  module.attr("op_layouts") = layouts();
  module.attr("attn_params_bytes") = sizeof(QfAttnParams);  // of a struct within a struct
  py::class_<OpCall>(module, "OpCall")
      .def(py::init<const std::string&, const std::string&, const std::vector<std::string>&, uintptr_t, uintptr_t,
                    uintptr_t>(),
           py::arg("struct"), py::arg("params"), py::arg("pointers"), py::arg("entry"), py::arg("status_text"),
           py::arg("workspace"))
      .def_property_readonly("workspace_bytes", &OpCall::workspace_bytes)
      .def("__call__", &OpCall::operator());
}
