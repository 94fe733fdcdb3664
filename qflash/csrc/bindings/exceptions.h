// A status of a C entry as a Python exception.
#ifndef QFLASH_BINDINGS_EXCEPTIONS_H_
#define QFLASH_BINDINGS_EXCEPTIONS_H_

#include <pybind11/pybind11.h>

#include <string>

#include "qflash.h"

namespace qflash {

using StatusText = const char* (*)(int);

[[noreturn]] inline void raise_status(int status, StatusText text) {
  const std::string message = text ? text(status) : "status " + std::to_string(status);
  if (status == QF_BAD_VALUE) throw pybind11::value_error(message);
  pybind11::object type =
      pybind11::module_::import("qflash.errors").attr(status == QF_UNSUPPORTED ? "NoKernelError" : "KernelError");
  PyErr_SetString(type.ptr(), message.c_str());
  throw pybind11::error_already_set();
}

}  // namespace qflash

#endif  // QFLASH_BINDINGS_EXCEPTIONS_H_
