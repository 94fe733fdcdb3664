// `dequantize`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes run
// in.
#include "kernels/dequantize/kernel.cuh"

extern "C" int qf_dequantize(const QfDequantizeParams* p, void*) {
  qf::Layout layout;
  if (const int status = qf::plan_dequantize(*p, layout)) return status;
  return host::launch_blocks([&] { qf_dequantize_kernel(*p, layout, qf::divider(p->group)); },
                             int64_t(layout.tiles) * p->batch, qf::kQuantizeThreads, 0, p->num_threads);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
