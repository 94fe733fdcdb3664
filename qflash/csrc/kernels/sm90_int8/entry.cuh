// The C entries of `sm90_int8` and its kin, whose files define QF_PV_FP8 first.
#pragma once

#include "attn/entry.cuh"
#include "attn/sm90_quantize/launch.cuh"
#include "kernels/sm90_int8/attend.cuh"

namespace qf {
namespace sm90 {

constexpr int kPrecision = kFp8 ? QF_INT8_FP8 : QF_INT8;

// As attend() has it.
inline int attend_on(const QfAttnParams& p, const QfQuantizedKv* kept, int rounding, uint64_t seed, void* stream) {
  if (const int status = check_params(&p, QF_DTYPE, kPrecision)) return status;
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
  return attend(p, kept, rounding, seed, processors, launch, borrow);
}

inline int attend_kept(const QfKvAttnParams& p, void* stream) {
  if (p.struct_bytes != int32_t(sizeof p)) return QF_BAD_ABI;
  return attend_on(p.attn, &p.kv, p.rounding, p.seed, stream);
}

}  // namespace sm90
}  // namespace qf
