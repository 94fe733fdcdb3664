// The addresses of a kernel's functions, all that a call needs of it. Functions of a compiled library take only the
// struct; functions shared by many kernels (cubins.cc) first take a context that identifies the kernel.
#ifndef QFLASH_BINDINGS_KERNEL_FUNCTIONS_H_
#define QFLASH_BINDINGS_KERNEL_FUNCTIONS_H_

#include <cstdint>

#include "exceptions.h"

namespace qflash {

struct KernelFunctions {
  uintptr_t entry, status_text, workspace;
  uintptr_t context;  // first argument of entry and workspace; 0: none

  StatusText text() const { return reinterpret_cast<StatusText>(status_text); }

  int run(const void* params, void* stream) const {
    if (context) return reinterpret_cast<int (*)(uintptr_t, const void*, void*)>(entry)(context, params, stream);
    return reinterpret_cast<int (*)(const void*, void*)>(entry)(params, stream);
  }

  int64_t workspace_bytes(const void* params) const {
    if (!workspace) return 0;
    if (context) return reinterpret_cast<int64_t (*)(uintptr_t, const void*)>(workspace)(context, params);
    return reinterpret_cast<int64_t (*)(const void*)>(workspace)(params);
  }
};

}  // namespace qflash

#endif  // QFLASH_BINDINGS_KERNEL_FUNCTIONS_H_
