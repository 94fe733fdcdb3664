// byte_products.cuh on the GPU.
#include <cuda_runtime.h>

#include "byte_products.cuh"

namespace byte_products {

template <int kN, int kRowBytes>
__global__ void __launch_bounds__(128) s8_kernel(const char* g_a, const char* g_b, int32_t* g_out) {
  extern __shared__ char s_bytes[];
  multiply_s8<kN, kRowBytes>(s_bytes, g_a, g_b, g_out);
}
template <int kN, int kRowBytes>
__global__ void __launch_bounds__(128) e4m3_kernel(const char* g_a, const char* g_b, float* g_out) {
  extern __shared__ char s_bytes[];
  multiply_e4m3<kN, kRowBytes>(s_bytes, g_a, g_b, g_out);
}

template <class Sum>
int run(void (*kernel)(const char*, const char*, Sum*), int bytes, const char* a, const char* b, Sum* out) {
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return error;
  kernel<<<1, 128, bytes>>>(a, b, out);
  if (const cudaError_t error = cudaGetLastError()) return error;
  return cudaDeviceSynchronize();
}

}  // namespace byte_products

#define QF_RUN(KERNEL, N, ROW) \
  if (n == N && row_bytes == ROW) return run(KERNEL<N, ROW>, Tiles<N, ROW>::kBytes, a, b, out);
#define QF_RUN_S8(N, ROW) QF_RUN(s8_kernel, N, ROW)
#define QF_RUN_E4M3(N, ROW) QF_RUN(e4m3_kernel, N, ROW)

// a: [64][128] bytes; b: [n][128]; out: [64][n] of int32, or of float32: the product and 0.5.
extern "C" __attribute__((visibility("default"))) int try_s8(int n, int row_bytes, const char* a, const char* b,
                                                             int32_t* out) {
  using namespace byte_products;
  QF_EACH_S8(QF_RUN_S8)
  return cudaErrorInvalidValue;
}
extern "C" __attribute__((visibility("default"))) int try_e4m3(int n, int row_bytes, const char* a, const char* b,
                                                               float* out) {
  using namespace byte_products;
  QF_EACH_E4M3(QF_RUN_E4M3)
  return cudaErrorInvalidValue;
}
