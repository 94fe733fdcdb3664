// `layer_norm`'s C entry over the emulated kernels. num_threads is the seed of the order that warps and lanes run in.
#include "kernels/layer_norm/layer_norm/kernel.cuh"

extern "C" int qf_layer_norm(const QfRowsParams* params, void*) {
  const auto launch = [](auto* kernel, const auto& p, qf::RowGrid grid, int, int threads, int shared_bytes) {
    return host::launch(kernel, p, grid, threads, shared_bytes, unsigned(p.num_threads));
  };
  return qf::layer_norm::run(*params, launch);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
