// C entry of `softmax_bwd`.
#include "kernels/softmax_backward/softmax_bwd/kernel.cuh"
#include "reduce/row_entry.cuh"

QF_EXPORT int64_t qf_softmax_bwd_workspace(const QfSoftmaxBwdParams*) { return 0; }

QF_EXPORT int qf_softmax_bwd(const QfSoftmaxBwdParams* p, void* stream) {
  using namespace qf::softmax_bwd;
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  if (p->columns == 0) return QF_OK;
  return qf::with_row_shape<Element, kMostGranules, kLongGranules, kLongThreads, kMostColumns>(
      p->columns, [&](auto shape, int threads) {
        return qf::launch_rows<decltype(shape)>(qf_softmax_bwd_kernel<decltype(shape)>, *p, threads, kSharedBytes,
                                                stream);
      });
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("softmax_bwd", status); }
