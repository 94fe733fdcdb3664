// C entry of `merge`.
#include "common/launch.cuh"
#include "kernels/merge/merge/kernel.cuh"

namespace {

using namespace qf;

// Is every row aligned for loads of four elements, and its length a multiple of four?
bool quads_aligned(const QfTensor& x, int head_dim, int element_bytes) {
  const bool address = reinterpret_cast<uintptr_t>(x.data) % (4 * element_bytes) == 0;
  return address && (x.stride_b | x.stride_t | x.stride_h | head_dim) % 4 == 0;
}

template <class ElementB>
int run(const QfMergeParams& p, cudaStream_t stream) {
  const int64_t quads = (int64_t(p.head_dim) + 3) / 4, count = int64_t(p.batch) * p.length * p.heads * quads;
  if (count == 0) return QF_OK;
  if (count > 0x7fffffff) return QF_UNSUPPORTED;  // counted in 32 bits
  constexpr int kBytes = sizeof(merge::Element);
  const merge::Aligned aligned = {quads_aligned(p.a, p.head_dim, kBytes),
                                  quads_aligned(p.b, p.head_dim, sizeof(ElementB)),
                                  quads_aligned(p.out, p.head_dim, kBytes)};
  return launch({(count + merge::kThreads - 1) / merge::kThreads, merge::kThreads, 0, stream, QF_ARCH >= 90},
                qf_merge_kernel<ElementB>, p, unsigned(quads), unsigned(count), aligned);
}

}  // namespace

QF_EXPORT int64_t qf_merge_workspace(const QfMergeParams*) { return 0; }

QF_EXPORT int qf_merge(const QfMergeParams* p, void* stream) {
  if (p->struct_bytes != int32_t(sizeof *p)) return QF_BAD_ABI;
  if (p->dtype != QF_DTYPE || p->head_dim < 1) return QF_UNSUPPORTED;
  const auto on = static_cast<cudaStream_t>(stream);
  if (p->b_dtype == QF_F32) return run<float>(*p, on);
  if (p->b_dtype == QF_F16) return run<F16>(*p, on);
  return p->b_dtype == QF_BF16 ? run<BF16>(*p, on) : int(QF_UNSUPPORTED);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("merge", status); }
