// C entry of `layer_norm_bwd`.
#include "kernels/layer_norm_backward/layer_norm_bwd/kernel.cuh"
#include "reduce/row_entry.cuh"

namespace qf {
namespace layer_norm_bwd {
namespace {

// dweight and dbias, after the kernel that stores the offsets of z.
int sum_over_rows(const QfLayerNormBwdParams& p, cudaStream_t stream) {
  constexpr int kThreads = 32 * kSumWarps;
  const int64_t blocks = (p.columns + kSumColumns - 1) / kSumColumns * chunks_of(p.rows);
  for (int64_t done = 0; done < blocks; done += kMostBlocks) {
    const Launch how = {blocks - done < kMostBlocks ? blocks - done : kMostBlocks, kThreads, kSumsSharedBytes, stream};
    if (const int status = launch(how, qf_layer_norm_bwd_sums_kernel, p, done)) return status;
  }
  const Launch how = {2 * ((p.columns + 31) / 32), kThreads, kTotalsSharedBytes, stream};
  return launch(how, qf_layer_norm_bwd_totals_kernel, p);
}

}  // namespace
}  // namespace layer_norm_bwd
}  // namespace qf

QF_EXPORT int64_t qf_layer_norm_bwd_workspace(const QfLayerNormBwdParams* p) {
  return qf::layer_norm_bwd::Workspace::bytes(*p);
}

QF_EXPORT int qf_layer_norm_bwd(const QfLayerNormBwdParams* p, void* stream) {
  using namespace qf::layer_norm_bwd;
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  if (p->columns == 0) return QF_OK;
  const int64_t needed = p->sums ? Workspace::bytes(*p) : 0;
  if (needed > 0 && (!p->workspace || p->workspace_bytes < needed)) return QF_NO_MEMORY;
  if (p->rows > 0) {  // else sums over rows are zero
    const int status = qf::with_row_shape<Element, kMostGranules, kLongGranules, kLongThreads, kMostColumns>(
        p->columns, [&](auto shape, int threads) {
          using Shape = decltype(shape);
          return qf::launch_rows<Shape>(qf_layer_norm_bwd_kernel<Shape>, *p, threads, kSharedBytes, stream);
        });
    if (status != QF_OK) return status;
  }
  if (!p->sums) return QF_OK;
  return sum_over_rows(*p, static_cast<cudaStream_t>(stream));
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("layer_norm_bwd", status); }
