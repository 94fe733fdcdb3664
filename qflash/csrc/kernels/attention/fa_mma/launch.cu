// C entry of `fa_mma`, for one kind of K and V (-DQF_KV_KIND): QF_KV_ARRAYS, or QF_KV_PAGES and with it
// QF_KV_PAGES_INT8.
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

// Pages of INT8, dequantized into the workspace first. A template: libraries for arrays have no such pass.
template <class Element>
int attend_int8(const QfAttnParams& p, cudaStream_t stream) {
  const GatheredPages gathered(p);
  if (!gathered.fit()) return QF_UNSUPPORTED;
  if (gathered.bytes > 0 && (!p.workspace || p.workspace_bytes < gathered.bytes)) return QF_NO_MEMORY;
  char* const memory = static_cast<char*>(p.workspace);
  const QfAttnParams placed = gathered.place(p, memory);
  if (const int status = launch_gather(qf_fa_mma_gather_kernel<Element>, p, placed, gathered, memory, stream))
    return status;
  return attend(placed, stream);
}

}  // namespace

QF_EXPORT int64_t qf_fa_mma_workspace(const QfAttnParams* p) {
  return p->kv.kind == QF_KV_PAGES_INT8 ? GatheredPages(*p).bytes : 0;
}

QF_EXPORT int qf_fa_mma(const QfAttnParams* p, void* stream) {
  if (const int status = check_params(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > kHeadDim) return QF_UNSUPPORTED;
  if constexpr (kPaged) {
    if (!pages_walk(*p)) return QF_UNSUPPORTED;
    if (kv_is_int8_pages(*p)) return attend_int8<Element>(*p, static_cast<cudaStream_t>(stream));
    return kv_is_pages(*p) ? attend(*p, stream) : int(QF_UNSUPPORTED);
  } else {
    return kv_is_arrays(*p) ? attend(*p, stream) : int(QF_UNSUPPORTED);
  }
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("fa_mma", status); }
