// C entry of `fa_mma`, for one kind of K and V (-DQF_KV_KIND).
#include "attn/entry.cuh"
#include "kernels/attention/fa_mma/kernel.cuh"

namespace {

using namespace qf;
using namespace qf::fa_mma;

int attend(const QfAttnParams& p, void* stream) {
  const auto aligned = [&](const QfTensor& x) { return chunks_aligned(x, p.head_dim, 2); };
  const Aligned all = {aligned(p.q), aligned(p.kv.k), aligned(p.kv.v), aligned(p.out)};
  const auto run = [&](auto* kernel) {
    return launch_grid(kernel, p, grid_of(p, kBlockM, 1), kThreads, kSharedBytes, stream, all);
  };
  constexpr bool kCanCopyAsync = kArch >= 80;
  const bool q_suits = kPaged || (!p.rope.cos && all.q);
  if (!kCanCopyAsync || !q_suits || !all.k || !all.v) return run(qf_fa_mma_kernel<false, BothSums>);
  return p.lse ? run(qf_fa_mma_kernel<kCanCopyAsync, BothSums>) : run(qf_fa_mma_kernel<kCanCopyAsync, RoundedSums>);
}

}  // namespace

QF_EXPORT int64_t qf_fa_mma_workspace(const QfAttnParams*) { return 0; }

QF_EXPORT int qf_fa_mma(const QfAttnParams* p, void* stream) {
  if (const int status = check_params(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  if (!(kPaged ? kv_is_pages(*p) : kv_is_arrays(*p))) return QF_UNSUPPORTED;
  return attend(*p, stream);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_mma", status); }
