// The part of NVIDIA's driver that is needed to launch machine code. The driver is opened at first use, and building
// needs no CUDA header.
#ifndef QFLASH_BINDINGS_CUDA_DRIVER_H_
#define QFLASH_BINDINGS_CUDA_DRIVER_H_

#include <string>

namespace qflash {

using CuKernel = void*;  // valid in every context of the process

// A failure of the driver: 0 is success.
struct DriverError {
  int status;
  std::string text;  // "cuLaunchKernel: CUDA_ERROR_INVALID_VALUE"
};

// Loads the kernel `name` from machine code or PTX, even during a stream capture. `image` is copied.
DriverError load_kernel(const void* image, const char* name, CuKernel& kernel);

// Allows blocks of the kernel `bytes` of dynamic shared memory on `device`.
DriverError allow_shared_bytes(CuKernel kernel, int bytes, int device);

// Sets `device` to the current device. If the calling thread has no context, first makes the stream's current.
DriverError current_device(void* stream, int& device);

// arguments: pointers to the arguments.
DriverError launch_kernel(CuKernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes, void* stream,
                          void** arguments);

}  // namespace qflash

#endif  // QFLASH_BINDINGS_CUDA_DRIVER_H_
