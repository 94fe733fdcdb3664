// C entry of `fa_tc`.
#include "attn/entry.cuh"
#include "kernels/attention/fa_tc/kernel.cuh"

QF_EXPORT int64_t qf_fa_tc_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa_tc(const QfAttnParams* p, void* stream) {
  using namespace qf::fa_tc;
  if (const int status = qf::check_unrotated_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim || p->head_dim % 8 != 0) return QF_UNSUPPORTED;
  const auto aligned = [&](const QfTensor& x) { return qf::chunks_aligned(x, p->head_dim, 2); };
  const Aligned all = {aligned(p->q), aligned(p->kv.k), aligned(p->kv.v), aligned(p->out)};
  const auto run = [&](auto* kernel) {
    return qf::launch_grid(kernel, *p, qf::grid_of(*p, kBlockM, 1), kThreads, kSharedBytes, stream, all);
  };
  constexpr bool kCanCopyAsync = kArch >= 80;
  if (kCanCopyAsync && all.q && all.k && all.v) return run(qf_fa_tc_kernel<kCanCopyAsync>);
  return run(qf_fa_tc_kernel<false>);
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text("fa_tc", status, ", takes no rope, packed arrays or head_dim that is no multiple of 8");
}
