/* A libcuda.so.1 for machines without a GPU: as much of NVIDIA's driver as csrc/bindings/cuda_driver.cc asks for.
 *
 * Device memory is the host's. Kernels are known by their names. "qf_triton_softmax_kernel" computes what it should, so
 * that a call can be checked from end to end; any other kernel writes its arguments, words of 8 bytes of which the last
 * two are the driver's own, to the address that its first argument is. Images must begin like an ELF file or with
 * "refused", which is. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kMostKernels = 64, kInvalidImage = 200, kInvalidContext = 201 };

typedef struct {
  char name[128];
  int arguments; /* of a kernel called name_<n> */
  int shared_bytes;
} Kernel;

static Kernel kernels[kMostKernels];
static int loaded;
static __thread void* context;
int fake_attribute_calls, fake_launches, fake_blocks, fake_threads, fake_shared_bytes;
void* fake_stream;

int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int status, const char** name) {
  *name = status == kInvalidImage ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR_FAKE";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void** found, int device) { return *found = &kernels[device], 0; }
int cuCtxGetCurrent(void** found) { return *found = context, 0; }
int cuCtxSetCurrent(void* given) { return context = given, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, context ? 0 : kInvalidContext; }
int cuStreamGetCtx(void* stream, void** found) { return *found = stream, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0, 0; }
int cuLibraryLoadData(void** library, const void* image, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  *library = &kernels[loaded];
  return memcmp(image, "\177ELF", 4) == 0 ? 0 : kInvalidImage;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  Kernel* const found = &kernels[loaded++];
  (void)library;
  snprintf(found->name, sizeof found->name, "%s", name);
  const char* const count = strrchr(name, '_');
  if (count) sscanf(count + 1, "%d", &found->arguments);
  *kernel = found;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  (void)device;
  ++fake_attribute_calls;
  if (attribute == 8) ((Kernel*)kernel)->shared_bytes = value;
  return 0;
}

static void softmax(void** arguments) {
  const float* x = *(float**)arguments[0];
  float* out = *(float**)arguments[2];
  const int64_t x_stride = *(int64_t*)arguments[1], out_stride = *(int64_t*)arguments[3];
  const int64_t rows = *(int64_t*)arguments[4], columns = *(int64_t*)arguments[5];
  const float scale = *(float*)arguments[6];
  for (int64_t row = 0; row < rows; ++row, x += x_stride, out += out_stride) {
    float most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < columns; ++i) most = fmaxf(most, scale * x[i]);
    for (int64_t i = 0; i < columns; ++i) sum += expf(scale * x[i] - most);
    for (int64_t i = 0; i < columns; ++i) out[i] = expf(scale * x[i] - most) / sum;
  }
}

int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c,
                   unsigned shared_bytes, void* stream, void** arguments, void** extra) {
  const Kernel* const known = kernel;
  if (!context || y != 1 || z != 1 || b != 1 || c != 1 || extra) return kInvalidContext;
  if (shared_bytes > 48 * 1024 && known->shared_bytes < (int)shared_bytes) return 1;
  ++fake_launches, fake_blocks = (int)x, fake_threads = (int)threads, fake_shared_bytes = (int)shared_bytes;
  fake_stream = stream;
  if (strcmp(known->name, "qf_triton_softmax_kernel") == 0) return softmax(arguments), 0;
  uint64_t* const words = *(uint64_t**)arguments[0];
  for (int i = 0; i < known->arguments + 2; ++i) memcpy(words + i, arguments[i], sizeof *words);
  return 0;
}
