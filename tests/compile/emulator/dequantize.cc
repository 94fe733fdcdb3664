// `dequantize`'s C entry over the emulated kernel. num_threads carries the seed of the order that warps and lanes run
// in.
#include "kernels/dequantize/dequantize/kernel.cuh"

extern "C" int qf_dequantize(const QfDequantizeParams* p, void*) {
  qf::DequantizePlan plan;
  if (const int status = qf::plan_dequantize(*p, plan)) return status;
  return host::launch_blocks([&] { qf_dequantize_kernel(*p, plan.layout, plan.group_of, plan.vector); }, plan.blocks,
                             qf::kQuantizeThreads, 0, p->num_threads);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
