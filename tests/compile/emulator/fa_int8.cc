// `fa_int8`'s C entry over the emulated kernels. num_threads carries the seed of the order that warps and lanes run in.
#include "kernels/fa_int8/kernel.cuh"
#include "kernels/fa_int8/workspace.h"

extern "C" int qf_fa_int8(const QfAttnParams* params, void*) {
  using namespace qf::fa_int8;
  QfAttnParams p = *params;
  Workspace workspace(p);
  std::vector<float4> memory(size_t(workspace.bytes) / sizeof(float4) + 1, float4{NAN, NAN, NAN, NAN});
  p.workspace = memory.data();
  const QfInt8AttnParams int8 = workspace.place(p);
  if (padded(p.head_dim) != p.head_dim) memset(p.workspace, 0, size_t(workspace.q_scales));
  const auto quantize = [&](const QfQuantizeParams& x) {
    return qf::run_quantize<Element, false>(x, [&](auto* kernel, int64_t blocks, const auto&... arguments) {
      return host::launch_blocks([&] { kernel(arguments...); }, blocks, qf::kQuantizeThreads, qf::kQuantizeSharedBytes,
                                 p.num_threads);
    });
  };
  if (const int status = quantize(workspace.k)) return status;
  if (const int status = quantize(workspace.q)) return status;
  const Access access = {true, true, qf::chunks_aligned(p.v, p.head_dim, 2), qf::chunks_aligned(p.out, p.head_dim, 2),
                         kKeyGroupLog};
  const qf::Grid grid = qf::grid_of(p, kBlockM, 1);
  const auto run = [&](auto* kernel) {
    return host::launch_blocks([&] { kernel(int8, grid, access); }, grid.items, kThreads, kSharedBytes, p.num_threads);
  };
  if (kArch < 80 || !access.v) return run(qf_fa_int8_kernel<false, false, false, qf::ExactSums>);
  return p.lse ? run(qf_fa_int8_kernel<true, false, false, qf::ExactSums>)
               : run(qf_fa_int8_kernel<true, false, false, qf::RoundedSums>);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
