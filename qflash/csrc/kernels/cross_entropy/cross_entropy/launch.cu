// C entry of `cross_entropy`.
#include "kernels/cross_entropy/cross_entropy/kernel.cuh"
#include "reduce/row_entry.cuh"

QF_EXPORT int64_t qf_cross_entropy_workspace(const QfCrossEntropyParams*) { return 0; }

QF_EXPORT int qf_cross_entropy(const QfCrossEntropyParams* p, void* stream) {
  using namespace qf::cross_entropy;
  if (const int status = qf::check_rows(p, QF_DTYPE)) return status;
  const int status =
      qf::with_row_shape<Element, kMostGranules, kLongGranules, kLongThreads>(p->columns, [&](auto shape, int threads) {
        using Shape = decltype(shape);
        return qf::launch_rows<Shape>(qf_cross_entropy_kernel<Shape>, *p, threads, kSharedBytes, stream);
      });
  if (status != QF_OK || !p->total) return status;
  const qf::Launch how = {1, kTotalThreads, kTotalSharedBytes, static_cast<cudaStream_t>(stream)};
  return qf::launch(how, qf_cross_entropy_total_kernel, *p, qf::RowGrid{0, 1});
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("cross_entropy", status); }
