// `unfused`'s C entry over the emulated kernels. num_threads carries the seed of the order that warps and lanes run in.
#include "kernels/attention/unfused/kernel.cuh"

extern "C" int qf_unfused(const QfAttnParams* params, void*) {
  using namespace qf::unfused;
  QfAttnParams p = *params;
  std::vector<float> scores(size_t(p.batch) * p.q_heads * p.q_len * p.k_len, NAN);
  p.workspace = scores.data();
  const auto tiles = [](int extent, int size) { return (extent + size - 1) / size; };
  const auto run = [&](auto* kernel, int rows, int parts, int shared_bytes) {
    return host::launch(kernel, p, qf::grid_of(p, rows, parts), kThreads, shared_bytes, p.num_threads);
  };
  if (const int status = run(qf_unfused_scores_kernel, kBlockM, tiles(p.k_len, kBlockN), kScoresSharedBytes))
    return status;
  if (const int status = run(qf_unfused_softmax_kernel, kSoftmaxRows, 1, 0)) return status;
  return run(qf_unfused_output_kernel, kBlockM, tiles(p.head_dim, kBlockD), kOutputSharedBytes);
}
extern "C" const char* qf_status_text(int) { return "a block is stuck: its threads wait for different things"; }
