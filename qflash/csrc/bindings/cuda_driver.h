// What is needed of NVIDIA's driver to launch machine code: it is opened when it is first asked for, and no header of
// CUDA's is needed to build.
#ifndef QFLASH_BINDINGS_CUDA_DRIVER_H_
#define QFLASH_BINDINGS_CUDA_DRIVER_H_

#include <string>

namespace qflash {

using CuKernel = void*;  // in every context of the process

// A failure of the driver: 0 is success.
struct DriverError {
  int status;
  std::string text;  // "cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"
};

// The kernel called `name` in machine code or PTX. Loads it, whatever the thread captures. `image` is copied.
DriverError load_kernel(const void* image, const char* name, CuKernel& kernel);

// Lets blocks of the kernel have so many bytes of shared memory on the current device.
DriverError allow_shared_bytes(CuKernel kernel, int bytes, int device);

// Makes a context current where the calling thread has none: the stream's. Tells the current device.
DriverError current_device(void* stream, int& device);

// arguments: pointers to them.
DriverError launch_kernel(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream,
                          void** arguments);

}  // namespace qflash

#endif  // QFLASH_BINDINGS_CUDA_DRIVER_H_
