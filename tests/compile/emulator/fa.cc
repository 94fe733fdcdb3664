// `fa`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes run in.
#include "kernels/attention/fa/kernel.cuh"

extern "C" int qf_fa(const QfAttnParams* p, void*) {
  using namespace qf::fa;
  return host::launch(qf_fa_kernel, *p, qf::grid_of(*p, kBlockM, 1), kThreads, kSharedBytes, p->num_threads);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
