// A profiling binary: one kernel, one specialisation, no Python. Checks it against the CPU engine, times it, exits.
//
// Built by `make KERNEL=<name>` (standalone.mk) from this file, the kernel's own launch.cu and the CPU engine's
// objects, for ncu, cuda-gdb and compute-sanitizer.
#include <cuda_runtime.h>

#include "standalone/reference.h"

#define QF_JOIN_(a, b) a##b
#define QF_JOIN(a, b) QF_JOIN_(a, b)
#define QF_TEXT_(x) #x
#define QF_TEXT(x) QF_TEXT_(x)
#define QF_ENTRY QF_JOIN(qf_, QF_KERNEL)
#define QF_WORKSPACE QF_JOIN(QF_ENTRY, _workspace)

extern "C" {
int QF_ENTRY(const QfAttnParams* params, void* stream);
int64_t QF_WORKSPACE(const QfAttnParams* params);
const char* qf_status_text(int status);
}

namespace qf {
namespace standalone {
namespace {

enum Exit { kAgrees = 0, kMismatch = 1, kBadFlag = 2, kCudaFailed = 3 };

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s (%s)\n", what, cudaGetErrorString(error), cudaGetErrorName(error));
  std::exit(kCudaFailed);
}

void check_status(int status) {
  if (status == QF_OK) return;
  std::fprintf(stderr, "%s\n", qf_status_text(status));
  std::exit(kCudaFailed);
}

// Device memory filled with NaN, so that a value that was never written shows.
void* poisoned(int64_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "allocating device memory");
  check(cudaMemset(memory, 0xff, bytes), "filling device memory");
  return memory;
}

void* on_device(const std::vector<Element>& values) {
  void* memory = poisoned(values.size() * sizeof(Element));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(Element), cudaMemcpyHostToDevice), "copying inputs");
  return memory;
}

void print_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "no CUDA device: %s\n", error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
    std::exit(kCudaFailed);
  }
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "asking for the device's properties");
  std::printf("%s on %s (compute capability %d.%d), compiled for sm_%d\n", QF_TEXT(QF_KERNEL), device.name,
              device.major, device.minor, QF_ARCH);
}

// Milliseconds of each timed run.
std::vector<float> time_runs(const QfAttnParams& p, const Options& o) {
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "creating an event");
  check(cudaEventCreate(&stop), "creating an event");
  for (int i = 0; i < o.warmup; i++) check_status(QF_ENTRY(&p, nullptr));
  std::vector<float> times(o.runs);
  for (float& time : times) {
    check(cudaEventRecord(start), "recording an event");
    check_status(QF_ENTRY(&p, nullptr));
    check(cudaEventRecord(stop), "recording an event");
    check(cudaEventSynchronize(stop), "running the kernel");
    check(cudaEventElapsedTime(&time, start, stop), "reading the time");
  }
  return times;
}

void print_times(std::vector<float> times, const Options& o) {
  if (times.empty()) return;
  std::sort(times.begin(), times.end());
  double sum = 0;
  for (const float time : times) sum += time;
  const double mean = sum / times.size(), median = times[times.size() / 2];
  const double flop = 4.0 * o.batch * o.heads * o.length * o.keys * o.head_dim * (o.causal ? 0.5 : 1.0);
  std::printf("%zu runs: mean %.4f ms, min %.4f ms, p50 %.4f ms, %.2f TFLOP/s at p50\n", times.size(), mean, times[0],
              median, flop / median * 1e-9);
}

int run(const Options& o) {
  print_device();
  std::printf("B=%d Tq=%d Tk=%d Hq=%d Hkv=%d D=%d %s %s, %s\n", o.batch, o.length, o.keys, o.heads, o.kv_heads,
              o.head_dim, o.causal ? "causal" : "full", kDtypes[QF_DTYPE], o.random ? "random" : "ones");
  const Inputs in = make_inputs(o);
  Reference reference;
  if (const int status = get_reference(o, in, &reference)) {
    std::fprintf(stderr, "CPU engine: %s\n", qf_cpu_status_text(status));
    return kCudaFailed;
  }
  std::vector<Element> out(q_count(o));
  std::vector<float> lse(lse_count(o));
  void* const device_out = poisoned(out.size() * sizeof(Element));
  float* const device_lse = static_cast<float*>(poisoned(lse.size() * sizeof(float)));
  QfAttnParams p =
      make_params(o, QF_DTYPE, QF_PRECISION, on_device(in.q), on_device(in.k), on_device(in.v), device_out, device_lse);
  p.workspace_bytes = QF_WORKSPACE(&p);
  p.workspace = poisoned(p.workspace_bytes);

  check_status(QF_ENTRY(&p, nullptr));
  check(cudaDeviceSynchronize(), "running the kernel");
  check(cudaMemcpy(out.data(), device_out, out.size() * sizeof(Element), cudaMemcpyDeviceToHost), "copying out");
  check(cudaMemcpy(lse.data(), device_lse, lse.size() * sizeof(float), cudaMemcpyDeviceToHost), "copying lse");
  if (!agrees(o, QF_PRECISION, in, reference, out, lse)) return kMismatch;
  print_times(time_runs(p, o), o);
  return kAgrees;
}

}  // namespace
}  // namespace standalone
}  // namespace qf

int main(int count, char** arguments) {
  for (int i = 1; i < count; i++)
    if (std::strcmp(arguments[i], "--help") == 0 || std::strcmp(arguments[i], "-h") == 0) {
      qf::standalone::print_help(QF_TEXT(QF_KERNEL));
      return 0;
    }
  qf::standalone::Options options;
  if (!qf::standalone::parse(count, arguments, &options)) return qf::standalone::kBadFlag;
  return qf::standalone::run(options);
}
