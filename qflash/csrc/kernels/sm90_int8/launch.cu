// C entry of `sm90_int8`, for one precision (-DQF_PRECISION): quantize q, and K and V unless they are kept, attend.
#include "attn/entry.cuh"
#include "attn/sm90_quantize/launch.cuh"
#include "kernels/sm90_int8/attend.cuh"

QF_EXPORT int64_t qf_sm90_int8_workspace(const QfAttnParams* p) { return qf::sm90::workspace_bytes(*p); }

QF_EXPORT int qf_sm90_int8(const QfAttnParams* p, void* stream) {
  using namespace qf;
  if (const int status = check_params(p, QF_DTYPE, QF_PRECISION)) return status;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  Borrowed borrowed{on};
  const auto borrow = [&](int64_t bytes) { return borrowed.take(bytes) == cudaSuccess ? borrowed.memory : nullptr; };
  const auto launch = [on](auto* kernel, int64_t blocks, int threads, int shared_bytes, bool overlaps,
                           const auto&... arguments) -> int {
    if (shared_bytes > 48 * 1024) {
      static std::atomic<uint64_t> devices_done[2];  // as many kernels need it
      const bool plain = reinterpret_cast<void*>(kernel) == reinterpret_cast<void*>(qf_sm90_int8_kernel<true>);
      if (const int status = allow_shared_memory(kernel, shared_bytes, devices_done[plain])) return status;
    }
    return launch_on(on, kernel, blocks, threads, shared_bytes, overlaps, arguments...);
  };
  return sm90::attend(*p, processors, launch, borrow);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("sm90_int8", status); }
