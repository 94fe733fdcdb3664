// `fa_tc`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes run in.
#include "kernels/attention/fa_tc/kernel.cuh"

extern "C" int qf_fa_tc(const QfAttnParams* p, void*) {
  using namespace qf::fa_tc;
  const auto aligned = [&](const QfTensor& x) { return qf::chunks_aligned(x, p->head_dim, 2); };
  const Aligned all = {aligned(p->q), aligned(p->kv.k), aligned(p->kv.v), aligned(p->out)};
  const qf::Grid grid = qf::grid_of(*p, kBlockM, 1);
  const auto run = [&](auto* kernel) {
    return host::launch_blocks([&] { kernel(*p, grid, all); }, grid.items, kThreads, kSharedBytes, p->num_threads);
  };
  if (kArch >= 80 && !p->rope.cos && all.q && all.k && all.v) return run(qf_fa_tc_kernel<true>);
  return run(qf_fa_tc_kernel<false>);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
