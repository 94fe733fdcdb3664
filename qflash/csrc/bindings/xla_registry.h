// Shared by the XLA handlers: kernels by their key, and failures as XLA errors.
//
// A compiled XLA program may outlive this process (compilation cache, jax.export), so it names its kernel by a text
// key. The registry maps keys to addresses; an unknown key is passed to the Python resolver that the JAX front end
// installs, which loads (or compiles) the kernel and registers it.
#ifndef QFLASH_BINDINGS_XLA_REGISTRY_H_
#define QFLASH_BINDINGS_XLA_REGISTRY_H_

#include <pybind11/pybind11.h>

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>

#include "kernel_functions.h"
#include "qflash.h"
#include "xla/ffi/api/ffi.h"

typedef struct CUstream_st* cudaStream_t;  // all that is needed of CUDA, so no CUDA header is included

namespace qflash {

namespace ffi = xla::ffi;
namespace py = pybind11;

// `takes` names the parameter struct of the entry: a program that would pass another one is rejected.
struct KernelAddresses {
  KernelFunctions functions;
  std::string takes;
};

class Registry {
 public:
  void add(const std::string& key, const KernelAddresses& kernel) {
    std::unique_lock lock(mutex_);
    kernels_[key] = kernel;
  }

  void set_resolver(py::object resolver) { resolver_ = resolver.release(); }

  // Throws std::runtime_error when the key cannot be resolved, or its kernel takes another struct than `takes`.
  KernelAddresses get(std::string_view key, std::string_view takes) {
    const std::string text(key);
    std::optional<KernelAddresses> kernel = find(text);
    if (!kernel) {
      resolve(text);
      kernel = find(text);
    }
    if (!kernel || kernel->takes != takes) throw std::runtime_error("no kernel is registered as " + text);
    return *kernel;
  }

 private:
  std::optional<KernelAddresses> find(const std::string& key) const {
    std::shared_lock lock(mutex_);
    const auto found = kernels_.find(key);
    return found == kernels_.end() ? std::nullopt : std::optional(found->second);
  }

  // The resolver calls add(), so no lock is held here; several threads may resolve one key, which is harmless.
  void resolve(const std::string& key) const {
    py::gil_scoped_acquire locked;
    if (!resolver_) return;
    try {
      resolver_(key);
    } catch (py::error_already_set& error) {
      // Copied while the interpreter lock is held: the exception's own destructor and text need it.
      throw std::runtime_error("kernel " + key + " could not be loaded: " + error.what());
    }
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, KernelAddresses> kernels_;
  py::handle resolver_;
};

inline Registry& registry() {
  static Registry* instance = new Registry;  // never destroyed: XLA's threads may outlast static destructors
  return *instance;
}

inline ffi::Error error_of(int status, StatusText text) {
  if (status == QF_OK) return ffi::Error::Success();
  std::string message = std::string("qflash: ") + (text ? text(status) : "status " + std::to_string(status));
  const bool bad_value = status == QF_BAD_VALUE;
  return bad_value ? ffi::Error::InvalidArgument(std::move(message)) : ffi::Error::Internal(std::move(message));
}

// Exceptions must not propagate through XLA.
template <class Body>
ffi::Error guarded(Body body) {
  try {
    return body();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(std::string("qflash: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("qflash: ") + error.what());
  }
}

template <class Handler>
py::capsule capsule_of(Handler* handler) {
  return py::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace qflash

#endif  // QFLASH_BINDINGS_XLA_REGISTRY_H_
