// `sm90_int8`'s C entries over the emulated kernels. num_threads carries the seed of everything that is left to chance.
// Whoever brings no workspace gets one.
#include "hopper_on_host.h"
#include "kernels/attention/sm90_int8/attend.cuh"

namespace {

constexpr int kProcessors = 3;  // few, so that each has several items and its rings go round

}  // namespace

extern "C" int64_t qf_sm90_int8_workspace(const QfAttnParams* p) { return qf::sm90::workspace_bytes(*p); }

extern "C" int qf_sm90_int8(const QfAttnParams* params, void*) {
  using namespace qf::sm90;
  QfAttnParams p = *params;
  host::extension = &host::hopper;
  if (p.precision != QF_PRECISION) return QF_UNSUPPORTED;
  std::vector<float4> memory;
  if (!p.workspace) {
    memory.assign(size_t(workspace_bytes(p)) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
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
  return attend(p, kProcessors, launch, borrow);
}
extern "C" const char* qf_status_text(int) { return host::complaint.c_str(); }
