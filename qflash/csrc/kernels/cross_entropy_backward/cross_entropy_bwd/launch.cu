// C entry of `cross_entropy_bwd`.
#include "kernels/cross_entropy_backward/cross_entropy_bwd/kernel.cuh"
#include "reduce/row_entry.cuh"

// For the gradient of each loss from that of their mean.
QF_EXPORT int64_t qf_cross_entropy_bwd_workspace(const QfCrossEntropyBwdParams*) { return sizeof(float); }

QF_EXPORT int qf_cross_entropy_bwd(const QfCrossEntropyBwdParams* p, void* stream) {
  using namespace qf::cross_entropy_bwd;
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  if (p->rows == 0) return QF_OK;
  if (p->dtotal && p->mean) {
    if (!p->workspace || p->workspace_bytes < qf_cross_entropy_bwd_workspace(p)) return QF_NO_MEMORY;
    const qf::Launch how = {1, kCountThreads, kShareSharedBytes, static_cast<cudaStream_t>(stream)};
    if (const int status = qf::launch(how, qf_cross_entropy_bwd_share_kernel, *p)) return status;
  }
  return qf::with_row_shape<Element, kMostGranules, kLongGranules, kLongThreads>(
      p->columns, [&](auto shape, int threads) {
        using Shape = decltype(shape);
        return qf::launch_rows<Shape>(qf_cross_entropy_bwd_kernel<Shape>, *p, threads, 0, stream);
      });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("cross_entropy_bwd", status); }
