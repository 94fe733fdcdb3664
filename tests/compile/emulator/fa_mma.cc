// `fa_mma`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes run in.
#include "kernels/attention/fa_mma/kernel.cuh"

extern "C" int qf_fa_mma(const QfAttnParams* p, void*) {
  using namespace qf::fa_mma;
  const auto aligned = [&](const QfTensor& x) { return qf::chunks_aligned(x, p->head_dim, 2); };
  const Aligned all = {aligned(p->q), aligned(p->kv.k), aligned(p->kv.v), aligned(p->out)};
  const qf::Grid grid = qf::grid_of(*p, kBlockM, 1);
  const auto run = [&](auto* kernel) {
    return host::launch_blocks([&] { kernel(*p, grid, all); }, grid.items, kThreads, kSharedBytes, p->num_threads);
  };
  if (kArch < 80 || p->rope.cos || !all.q || !all.k || !all.v) return run(qf_fa_mma_kernel<false, qf::BothSums>);
  return p->lse ? run(qf_fa_mma_kernel<true, qf::BothSums>) : run(qf_fa_mma_kernel<true, qf::RoundedSums>);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
