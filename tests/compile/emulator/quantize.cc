// `quantize`'s C entry over the emulated kernels. num_threads carries the seed of the order that warps and lanes run
// in.
#include "kernels/quantize/quantize/config.h"
#include "kernels/quantize/quantize/plan.cuh"

extern "C" int qf_quantize(const QfQuantizeParams* params, void*) {
  QfQuantizeParams p = *params;
  if (const int status = qf::check_quantize(p)) return status;
  std::vector<float> workspace(qf::plan_quantize(p).workspace_bytes() / sizeof(float), NAN);
  p.workspace = workspace.data();
  p.workspace_bytes = workspace.size() * sizeof(float);
  const auto launch = [&](auto* kernel, int64_t blocks, const auto&... arguments) {
    return host::launch_blocks([&] { kernel(arguments...); }, blocks, qf::kQuantizeThreads, qf::kQuantizeSharedBytes,
                               p.num_threads);
  };
  return qf::run_quantize<qf::quantize::Element, true>(p, launch);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
