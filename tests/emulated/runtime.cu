// What the emulator's CUDA runtime allows, refuses and reports, asked as a kernel's launch code would ask.
#include "common/launch.cuh"
#include "qflash_ops.h"

// Lane 3 of warp 1 of block 1 waits for the block, the others of its warp for their warp: neither comes about.
__global__ void stuck_kernel() {
  if (blockIdx.x == 1 && threadIdx.x >= 32 && threadIdx.x != 35) __syncwarp();
  __syncthreads();
}

__global__ void idle_kernel() {}

// Each block's number of blocks, threads, and the first word of its shared memory, which nobody wrote.
__global__ void report_kernel(float* g_out) {
  extern __shared__ float4 s_memory[];
  if (threadIdx.x > 0) return;
  g_out[3 * blockIdx.x] = float(gridDim.x);
  g_out[3 * blockIdx.x + 1] = float(blockDim.x);
  g_out[3 * blockIdx.x + 2] = s_memory[0].x;
}

// A C entry like a kernel's.
QF_EXPORT int64_t qf_runtime_workspace(const QfRowsParams*) { return 0; }
QF_EXPORT int qf_runtime(const QfRowsParams*, void* stream) {
  return qf::launch({3, 64, 0, static_cast<cudaStream_t>(stream)}, stuck_kernel);
}
QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("runtime", status); }

// With as much shared memory as is allowed without asking, or as was asked for. Returns a cudaError_t.
QF_EXPORT int try_launch(int64_t blocks, int threads, int bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(bytes);
  return cudaLaunchKernelEx(&config, idle_kernel);
}
QF_EXPORT int try_allow(int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(idle_kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              bytes);
}
QF_EXPORT int try_report(int64_t blocks, int threads, float* out) {
  return qf::launch({blocks, threads, 16, nullptr}, report_kernel, out);
}
QF_EXPORT int try_multiprocessors() {
  int count = 0;
  return qf::multiprocessors(count) == QF_OK ? count : -1;
}
// The first error since the last call, which takes it off the record.
QF_EXPORT int try_last_error() { return cudaGetLastError(); }

// How many words of memory that was just borrowed are NaN.
QF_EXPORT int try_borrow(int words) {
  qf::Borrowed borrowed{nullptr};
  if (borrowed.take(int64_t(words) * 4) != cudaSuccess) return -1;
  int nans = 0;
  for (int i = 0; i < words; ++i) nans += std::isnan(static_cast<float*>(borrowed.memory)[i]);
  return nans;
}

QF_EXPORT int try_stream(void* stream, unsigned long long* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  if (const cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, id)) return error;
  if (status != cudaStreamCaptureStatusNone) return -1;
  return cudaStreamGetId(static_cast<cudaStream_t>(stream), id);
}

// Threads that leave all memory, and that never end.
__global__ void outside_kernel(const int* g_from, int* g_to) {
  if (threadIdx.x == 5) *g_to = g_from[int64_t(1) << 40];
}
__global__ void forever_kernel(const volatile int* g_stop) {
  while (threadIdx.x == 7 && !*g_stop) {
  }
}
QF_EXPORT int try_outside(int* memory) { return qf::launch({2, 64, 0, nullptr}, outside_kernel, memory, memory); }
QF_EXPORT int try_forever(int* memory) { return qf::launch({2, 64, 0, nullptr}, forever_kernel, memory); }

// How many events of each kind an observer sees of a stuck launch.
static int event_counts[16];
QF_EXPORT int try_observer(int* counts) {
  emulate::observer = [](const emulate::Event& event) { ++event_counts[event.kind]; };
  qf::launch({3, 64, 0, nullptr}, stuck_kernel);
  emulate::observer = nullptr;
  for (int i = 0; i < 16; ++i) counts[i] = event_counts[i];
  return 0;
}
