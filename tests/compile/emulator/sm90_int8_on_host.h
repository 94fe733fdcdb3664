// The C entries of `sm90_int8` and its kin over the emulated kernels. num_threads carries the seed of everything that
// is left to chance. Whoever brings no workspace gets one. Their files define QF_PV_FP8 first.
#pragma once

#include "hopper_on_host.h"
#include "kernels/sm90_int8/attend.cuh"

namespace {

constexpr int kProcessors = 3;  // few, so that each has several items and its rings go round

int attend_on_host(QfAttnParams p, const QfQuantizedKv* kept, int rounding, uint64_t seed) {
  using namespace qf::sm90;
  host::extension = &host::hopper;
  std::vector<float4> memory;
  if (!p.workspace) {
    memory.assign(size_t(workspace_bytes(p, kept)) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
    p.workspace = memory.data();
    p.workspace_bytes = int64_t(memory.size() * sizeof(float4));
  }
  std::vector<float4> borrowed;
  const auto borrow = [&](int64_t bytes) -> void* {
    borrowed.assign(size_t(bytes) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
    return borrowed.data();
  };
  const auto launch = [&](auto* kernel, int64_t blocks, int threads, int shared_bytes, bool, const auto&... arguments) {
    return host::launch_blocks([&] { kernel(arguments...); }, blocks, threads, shared_bytes, p.num_threads);
  };
  host::complaint = "the tensor map was refused";
  return attend(p, kept, rounding, seed, kProcessors, launch, borrow);
}

}  // namespace

extern "C" const char* qf_status_text(int) { return host::complaint.c_str(); }
