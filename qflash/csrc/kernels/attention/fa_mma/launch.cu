// C entry of `fa_mma`.
#include "attn/entry.cuh"
#include "kernels/attention/fa_mma/kernel.cuh"

QF_EXPORT int64_t qf_fa_mma_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa_mma(const QfAttnParams* p, void* stream) {
  using namespace qf::fa_mma;
  if (const int status = qf::check_arrays(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  const auto aligned = [&](const QfTensor& x) { return qf::chunks_aligned(x, p->head_dim, 2); };
  const Aligned all = {aligned(p->q), aligned(p->kv.k), aligned(p->kv.v), aligned(p->out)};
  const auto run = [&](auto* kernel) {
    return qf::launch_grid(kernel, *p, qf::grid_of(*p, kBlockM, 1), kThreads, kSharedBytes, stream, all);
  };
  constexpr bool kCanCopyAsync = kArch >= 80;
  if (!kCanCopyAsync || p->rope.cos || !all.q || !all.k || !all.v) return run(qf_fa_mma_kernel<false, qf::BothSums>);
  return p->lse ? run(qf_fa_mma_kernel<kCanCopyAsync, qf::BothSums>)
                : run(qf_fa_mma_kernel<kCanCopyAsync, qf::RoundedSums>);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_mma", status); }
