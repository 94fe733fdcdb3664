// C entry of `unfused`.
#include "attn/entry.cuh"
#include "kernels/attention/unfused/kernel.cuh"

// One float per score; INT64_MAX, which no allocator has, when that does not fit 64 bits.
QF_EXPORT int64_t qf_unfused_workspace(const QfAttnParams* p) {
  int64_t bytes = sizeof(float);
  for (const int32_t extent : {p->batch, p->q_heads, p->q_len, p->k_len})
    if (__builtin_mul_overflow(bytes, int64_t(extent), &bytes)) return INT64_MAX;
  return bytes;
}

QF_EXPORT int qf_unfused(const QfAttnParams* p, void* stream) {
  using namespace qf::unfused;
  if (const int status = qf::check_unrotated_arrays(p, QF_DTYPE)) return status;
  const int64_t needed = qf_unfused_workspace(p);
  if (needed > 0 && (!p->workspace || p->workspace_bytes < needed)) return QF_NO_MEMORY;
  const auto tiles = [](int extent, int size) { return (extent + size - 1) / size; };
  const auto run = [&](auto* kernel, int rows, int parts, int shared_bytes) {
    return qf::launch_grid(kernel, *p, qf::grid_of(*p, rows, parts), kThreads, shared_bytes, stream);
  };
  if (const int status = run(qf_unfused_scores_kernel, kBlockM, tiles(p->k_len, kBlockN), kScoresSharedBytes))
    return status;
  if (const int status = run(qf_unfused_softmax_kernel, kSoftmaxRows, 1, 0)) return status;
  return run(qf_unfused_output_kernel, kBlockM, tiles(p->head_dim, kBlockD), kOutputSharedBytes);
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text("unfused", status, ", takes no rope or packed arrays");
}
