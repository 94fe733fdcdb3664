// The quantization pass over the emulated kernels: `sm90_quantize`'s C entry, and q, k and v in one go as attention
// runs it. num_threads carries the seed of the order that warps and lanes run in.
#include "kernels/quantize_kv/sm90_quantize/config.h"
#include "kernels/quantize_kv/sm90_quantize/plan.cuh"

static int run(const qf::QuantizeAll& all, int seed) {
  const auto launch = [&](auto* kernel, int64_t blocks, int threads, int shared_bytes, bool, const auto&... arguments) {
    return host::launch_blocks([&] { kernel(arguments...); }, blocks, threads, shared_bytes, seed);
  };
  const int64_t many_blocks = seed % 2 == 0 ? 1 : qf::sm90_quantize::kManyBlocks;
  return qf::run_sm90_quantize<qf::sm90_quantize::Element, qf::sm90_quantize::kHeadDim>(all, launch, many_blocks);
}

extern "C" int qf_sm90_quantize(const QfQuantizeKvParams* p, void*) {
  return qf::writes_kept(*p) ? run(qf::quantization_of(*p), p->num_threads) : int(QF_UNSUPPORTED);
}
// attn: what comes. p: what becomes of k and v. The rest: what becomes of q.
extern "C" int quantize_all(const QfAttnParams* attn, const QfQuantizeKvParams* p, int8_t* q, float* q_scale,
                            float* q_lift, int* counter) {
  return run({*attn, qf::kept_of(p->kv), {q, q_scale, q_lift}, counter, p->rounding, p->seed}, p->num_threads);
}
extern "C" const char* qf_status_text(int) { return host::complaint.c_str(); }
