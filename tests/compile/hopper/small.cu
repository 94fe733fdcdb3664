// small.cuh on the GPU.
#include <cuda_runtime.h>

#include "small.cuh"

namespace small {

__global__ void store_matrices_kernel(const uint32_t* g_words, const int32_t* g_rows, char* g_out) {
  __shared__ alignas(16) char s_memory[kSharedBytes];
  store_matrices(s_memory, g_words, g_rows, g_out);
}
__global__ void add_zeros_kernel(int dtype, int count, const uint32_t* g_x, const uint32_t* g_sums, uint32_t* g_out) {
  add_zeros(dtype, count, g_x, g_sums, g_out);
}
__global__ void add_pairs_kernel(int count, const uint32_t* g_x, const uint32_t* g_y, uint32_t* g_out) {
  add_pairs(count, g_x, g_y, g_out);
}
__global__ void encode_kernel(int count, const float* g_x, uint32_t* g_codes) { encode(count, g_x, g_codes); }
__global__ void decode_kernel(int count, const uint32_t* g_codes, uint32_t* g_out) { decode(count, g_codes, g_out); }
__global__ void ask_kernel(int count, int32_t* g_answers) {
  __shared__ alignas(16) char s_memory[kSharedBytes];
  ask(s_memory, count, g_answers);
}
__global__ void hand_over_kernel(int rounds, int32_t* g_found) {
  __shared__ alignas(16) char s_memory[kSharedBytes];
  hand_over(s_memory, rounds, g_found);
}

int finish() {
  if (const cudaError_t error = cudaGetLastError()) return error;
  return cudaDeviceSynchronize();
}

}  // namespace small

#define QF_TRY extern "C" __attribute__((visibility("default"))) int

QF_TRY try_matrices(const uint32_t* words, const int32_t* rows, char* out) {
  small::store_matrices_kernel<<<1, 32>>>(words, rows, out);
  return small::finish();
}
QF_TRY try_zeros(int dtype, int count, const uint32_t* x, const uint32_t* sums, uint32_t* out) {
  small::add_zeros_kernel<<<1, 32>>>(dtype, count, x, sums, out);
  return small::finish();
}
QF_TRY try_pairs(int count, const uint32_t* x, const uint32_t* y, uint32_t* out) {
  small::add_pairs_kernel<<<1, 32>>>(count, x, y, out);
  return small::finish();
}
QF_TRY try_codes(int count, const float* x, uint32_t* codes) {
  small::encode_kernel<<<1, 32>>>(count, x, codes);
  return small::finish();
}
QF_TRY try_decoded(int count, const uint32_t* codes, uint32_t* out) {
  small::decode_kernel<<<1, 32>>>(count, codes, out);
  return small::finish();
}
QF_TRY try_answers(int count, int32_t* answers) {
  small::ask_kernel<<<1, 32>>>(count, answers);
  return small::finish();
}
QF_TRY try_numbers(int rounds, int32_t* found) {
  small::hand_over_kernel<<<1, 64>>>(rounds, found);
  return small::finish();
}
