// XLA FFI handlers (placeholder until the JAX front end lands).
#include <pybind11/pybind11.h>

void bind_xla_ffi(pybind11::module_&) {}
