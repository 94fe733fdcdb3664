#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstdint>

namespace qflash {
namespace {

// Constants of cuda.h, which do not change.
constexpr int kNotInitialised = 3, kNotFound = 500;
constexpr int kMostDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kRelaxed = 2;                 // CU_STREAM_CAPTURE_MODE_RELAXED

struct Driver {
  int (*cuInit)(unsigned);
  int (*cuGetErrorName)(int, const char**);
  int (*cuDeviceGet)(int*, int);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuCtxGetDevice)(int*);
  int (*cuStreamGetCtx)(void*, void**);
  int (*cuThreadExchangeStreamCaptureMode)(int*);
  int (*cuLibraryLoadData)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*cuLibraryGetKernel)(void**, void*, const char*);
  int (*cuKernelSetAttribute)(int, int, void*, int);
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**);
  std::string missing;  // why the driver cannot be used; empty if it can

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      missing = "no NVIDIA driver: libcuda.so.1 cannot be opened";
      return;
    }
#define QF_FIND(name) find(library, #name, name)
    QF_FIND(cuInit), QF_FIND(cuGetErrorName), QF_FIND(cuDeviceGet), QF_FIND(cuDevicePrimaryCtxRetain);
    QF_FIND(cuCtxGetCurrent), QF_FIND(cuCtxSetCurrent), QF_FIND(cuCtxGetDevice), QF_FIND(cuStreamGetCtx);
    QF_FIND(cuThreadExchangeStreamCaptureMode), QF_FIND(cuLibraryLoadData), QF_FIND(cuLibraryGetKernel);
    QF_FIND(cuKernelSetAttribute), QF_FIND(cuLaunchKernel);
#undef QF_FIND
  }

  template <class Function>
  void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) missing = std::string("the NVIDIA driver has no ") + name + ": CUDA 12.0 or newer is needed";
  }
};

const Driver& driver() {
  static const Driver* const instance = new Driver;  // never destroyed: threads may outlast static destructors
  return *instance;
}

DriverError error_of(int status, const char* function) {
  if (status == 0) return {0, ""};
  const char* name = nullptr;
  if (driver().cuGetErrorName(status, &name) != 0 || !name) name = "an unknown error";
  return {status, std::string(function) + ": " + name};
}

// Calls a driver function; if that fails, the enclosing function returns its error.
#define QF_DRIVER(function, ...)                                                   \
  do {                                                                             \
    const DriverError error = error_of(driver().function(__VA_ARGS__), #function); \
    if (error.status != 0) return error;                                           \
  } while (false)

// During its lifetime, the thread may make calls that the capture of another stream would forbid.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = kRelaxed;
};

}  // namespace

DriverError load_kernel(const void* image, const char* name, CuKernel& kernel) {
  if (!driver().missing.empty()) return {kNotFound, driver().missing};
  const RelaxedCapture relaxed;
  void* library = nullptr;
  QF_DRIVER(cuLibraryLoadData, &library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  QF_DRIVER(cuLibraryGetKernel, &kernel, library, name);
  return {0, ""};
}

DriverError allow_shared_bytes(CuKernel kernel, int bytes, int device) {
  QF_DRIVER(cuKernelSetAttribute, kMostDynamicSharedBytes, bytes, kernel, device);
  return {0, ""};
}

DriverError current_device(void* stream, int& device) {
  if (!driver().missing.empty()) return {kNotFound, driver().missing};
  void* context = nullptr;
  if (driver().cuCtxGetCurrent(&context) == kNotInitialised) QF_DRIVER(cuInit, 0);
  if (!context) {                             // no CUDA library has been called on this thread yet
    constexpr uintptr_t kSpecialStreams = 2;  // null, legacy and per-thread, which belong to no context
    if (reinterpret_cast<uintptr_t>(stream) > kSpecialStreams) {
      QF_DRIVER(cuStreamGetCtx, stream, &context);
    } else {
      QF_DRIVER(cuDeviceGet, &device, 0);
      QF_DRIVER(cuDevicePrimaryCtxRetain, &context, device);
    }
    QF_DRIVER(cuCtxSetCurrent, context);
  }
  QF_DRIVER(cuCtxGetDevice, &device);
  return {0, ""};
}

DriverError launch_kernel(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream,
                          void** arguments) {
  QF_DRIVER(cuLaunchKernel, kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, nullptr);
  return {0, ""};
}

}  // namespace qflash
