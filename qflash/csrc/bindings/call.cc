// _native.Call: a prepared call of any kernel, for Python.
//
// It is the last step of every eager call, so it is a separate CPython type with the vectorcall protocol: addresses
// arrive as an array of ints, and no tuple is built and no argument is looked up by name or type.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "exceptions.h"
#include "kernel_functions.h"
#include "op_layouts.h"
#include "unlocked.h"

namespace py = pybind11;

namespace qflash {
namespace {

// The contents of a Call. Immutable, so threads share it.
struct Prepared {
  OpParams params;  // everything except addresses
  std::vector<size_t> pointers;
  KernelFunctions kernel;
  int64_t workspace_bytes;
};

struct Call {
  PyObject_HEAD vectorcallfunc vectorcall;
  Prepared* prepared;
};

const Prepared& prepared_of(PyObject* self) { return *reinterpret_cast<Call*>(self)->prepared; }

// The arguments after the addresses of arrays.
enum Trailing { kWorkspace, kStream, kThreads, kTrailing };

// Returns body()'s object, or null with its C++ exception set as a Python exception.
template <class Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// False, with an exception set, if args[index] is not an address.
bool read_address(PyObject* const* args, size_t index, void*& address) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(args[index]);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "argument %zu is %R; allowed: an address, an int from 0 to 2^64 - 1", index,
                 args[index]);
    return false;
  }
  address = reinterpret_cast<void*>(static_cast<uintptr_t>(value));
  return true;
}

// The number that a method of x without arguments returns; -1 with an exception set.
long long number_of(PyObject* x, PyObject* method) {
  PyObject* const told = PyObject_CallMethodNoArgs(x, method);
  const long long number = told ? PyLong_AsLongLong(told) : -1;
  Py_XDECREF(told);
  return number;
}

// Like read_address, but also accepts an array with PyTorch's data_ptr(); if it has elements, it must have memory.
bool read_array(PyObject* const* args, size_t index, void*& address) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const numel = PyUnicode_InternFromString("numel");
  if (PyLong_Check(args[index]) || !PyObject_HasAttr(args[index], data_ptr)) return read_address(args, index, address);
  const long long told = number_of(args[index], data_ptr);
  if (told == -1 && PyErr_Occurred()) return false;
  address = reinterpret_cast<void*>(static_cast<uintptr_t>(told));
  if (told == 0 && number_of(args[index], numel) != 0) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "argument %zu has no storage", index);
    return false;
  }
  return true;
}

bool read_threads(PyObject* arg, int32_t& threads) {
  int overflow = 0;
  const long value = PyLong_Check(arg) ? PyLong_AsLongAndOverflow(arg, &overflow) : -1;
  if (!PyLong_Check(arg) || overflow != 0 || value < INT32_MIN || value > INT32_MAX) {
    PyErr_Format(PyExc_TypeError, "num_threads is %R; allowed: an int of 32 bits", arg);
    return false;
  }
  threads = static_cast<int32_t>(value);
  return true;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t flagged_count, PyObject* names) {
  const Prepared& prepared = prepared_of(self);
  const size_t given = static_cast<size_t>(PyVectorcall_NARGS(flagged_count)), count = prepared.pointers.size();
  if (given != count + kTrailing || (names && PyTuple_GET_SIZE(names) > 0)) {
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    PyErr_Format(PyExc_TypeError, "a call with %zu pointers was given %zu numbers and %zd names; allowed: %zu numbers",
                 count, given, named, count + kTrailing);
    return nullptr;
  }
  OpParams params = prepared.params;
  void* address = nullptr;
  for (size_t i = 0; i < count; ++i) {
    if (!read_array(args, i, address)) return nullptr;
    params.set_pointer(prepared.pointers[i], address);
  }
  if (!read_address(args, count + kWorkspace, address)) return nullptr;
  params.set_workspace(address, prepared.workspace_bytes);
  void* stream = nullptr;
  int32_t threads = 0;
  if (!read_address(args, count + kStream, stream) || !read_threads(args[count + kThreads], threads)) return nullptr;
  params.set_threads(threads);
  return guarded([&]() -> PyObject* {
    const int status = run_unlocked([&] { return prepared.kernel.run(params.data(), stream); });
    if (status != QF_OK) raise_status(status, prepared.kernel.text());
    Py_RETURN_NONE;
  });
}

const OpLayout& layout_named(const char* name) {
  const OpLayout* layout = find_op_layout(name);
  if (!layout) throw py::key_error(std::string("no operation takes a struct ") + name);
  return *layout;
}

Prepared prepare(const char* name, PyObject* params, PyObject* pointers, const KernelFunctions& kernel) {
  const OpLayout& layout = layout_named(name);
  Prepared prepared{
      OpParams(layout, PyBytes_AS_STRING(params), static_cast<size_t>(PyBytes_GET_SIZE(params))), {}, kernel, 0};
  for (const std::string& pointer : py::handle(pointers).cast<std::vector<std::string>>()) {
    const OpField* field = layout.find(pointer);
    if (!field || field->kind != 'P') throw py::key_error(std::string(name) + " has no pointer " + pointer);
    prepared.pointers.push_back(field->offset);
  }
  prepared.workspace_bytes = kernel.workspace_bytes(prepared.params.data());
  return prepared;
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"struct",      "params",    "pointers", "entry",
                                "status_text", "workspace", "context",  nullptr};
  const char* name = nullptr;
  PyObject *params = nullptr, *pointers = nullptr;
  unsigned long long entry = 0, text = 0, workspace = 0, context = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "sSOKKK|K:Call", const_cast<char**>(names), &name, &params,
                                   &pointers, &entry, &text, &workspace, &context))
    return nullptr;
  return guarded([&] {
    auto prepared =
        std::make_unique<Prepared>(prepare(name, params, pointers, KernelFunctions{entry, text, workspace, context}));
    PyObject* const self = type->tp_alloc(type, 0);
    if (!self) throw py::error_already_set();
    reinterpret_cast<Call*>(self)->vectorcall = call;
    reinterpret_cast<Call*>(self)->prepared = prepared.release();
    return self;
  });
}

void destroy(PyObject* self) {
  delete reinterpret_cast<Call*>(self)->prepared;
  Py_TYPE(self)->tp_free(self);
}

PyObject* workspace_bytes(PyObject* self, void*) { return PyLong_FromLongLong(prepared_of(self).workspace_bytes); }

PyGetSetDef kProperties[] = {
    {"workspace_bytes", workspace_bytes, nullptr, "How many bytes `workspace` must point to.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject call_type() {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "qflash._native.Call";
  type.tp_doc =
      "Call(struct, params, pointers, entry, status_text, workspace, context=0)\n--\n\n"
      "A prepared call of a kernel. Immutable, so threads share it.\n\n"
      "It is called with addresses, or arrays that have a data_ptr(), in the order of `pointers`, then with workspace, "
      "stream and num_threads.";
  type.tp_basicsize = sizeof(Call);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(Call, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = create;
  type.tp_dealloc = destroy;
  type.tp_getset = kProperties;
  return type;
}

// {struct: (bytes, {field: (offset, kind)})}
py::dict layouts() {
  py::dict all;
  for (const OpLayout& layout : op_layouts()) {
    py::dict fields;
    for (const OpField& field : layout.fields)
      fields[py::str(field.name)] = py::make_tuple(field.offset, std::string(1, field.kind));
    all[layout.name] = py::make_tuple(layout.bytes, fields);
  }
  return all;
}

}  // namespace
}  // namespace qflash

void bind_call(py::module_& module) {
  static PyTypeObject type = qflash::call_type();
  if (PyType_Ready(&type) < 0) throw py::error_already_set();
  module.attr("Call") = py::handle(reinterpret_cast<PyObject*>(&type));
  module.attr("op_layouts") = qflash::layouts();
  module.attr("ABI") = qflash::abi();
}
