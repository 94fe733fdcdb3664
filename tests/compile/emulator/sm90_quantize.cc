// The quantization pass over the emulated kernels: `sm90_quantize`'s C entry, and q, k and v in one go as attention
// runs it. attn.num_threads carries the seed of the order that warps and lanes run in.
#include "attn/sm90_quantize/plan.cuh"
#include "kernels/sm90_quantize/config.h"

static int run(const qf::QuantizeAll& all) {
  const auto launch = [&](auto* kernel, int64_t blocks, int threads, int shared_bytes, bool, const auto&... arguments) {
    return host::launch_blocks([&] { kernel(arguments...); }, blocks, threads, shared_bytes, all.attn.num_threads);
  };
  const int64_t many_blocks = all.attn.num_threads % 2 == 0 ? 1 : qf::sm90_quantize::kManyBlocks;
  return qf::run_sm90_quantize<qf::sm90_quantize::Element, qf::sm90_quantize::kHeadDim>(all, launch, many_blocks);
}

extern "C" int qf_sm90_quantize(const QfKvAttnParams* p, void*) {
  return run({p->attn, p->kv, {}, nullptr, p->rounding, p->seed});
}
extern "C" int quantize_all(const QfKvAttnParams* p, int8_t* q, float* q_scale, float* q_lift, int* counter) {
  return run({p->attn, p->kv, {q, q_scale, q_lift}, counter, p->rounding, p->seed});
}
extern "C" const char* qf_status_text(int) { return host::complaint.c_str(); }
