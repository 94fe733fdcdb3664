// C entry of `rope`.
#include "common/launch.cuh"
#include "kernels/rope/rope/kernel.cuh"

namespace qf {
namespace rope {

bool is_served(const QfRopeParams& p) {
  const bool rotates = p.rope.rotary_dim >= 0 && p.rope.rotary_dim % 2 == 0 && p.rope.rotary_dim <= p.head_dim;
  return p.dtype == QF_DTYPE && p.head_dim >= 1 && rotates && p.rope.cos && p.rope.sin;
}

bool granules_aligned(const QfRopeParams& p, const QfTensor& x) {
  const auto whole = [](int extent, int64_t stride) { return extent <= 1 || stride % kVector == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && whole(p.batch, x.stride_b) && whole(p.length, x.stride_t) &&
         whole(p.heads, x.stride_h);
}

// May everything be read and written sixteen bytes at a time?
bool vectorises(const QfRopeParams& p) {
  const bool tables = (reinterpret_cast<uintptr_t>(p.rope.cos) | reinterpret_cast<uintptr_t>(p.rope.sin)) % 16 == 0;
  return p.head_dim % kVector == 0 && p.rope.rotary_dim % (2 * kVector) == 0 && tables && granules_aligned(p, p.x) &&
         granules_aligned(p, p.out);
}

template <int kCount>
int run(const QfRopeParams& p, cudaStream_t stream) {
  const auto ceil_of = [](int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; };
  const int64_t rotated = p.rope.rotary_dim / 2 / kCount;
  const int64_t units = rotated + ceil_of(p.head_dim - p.rope.rotary_dim, 2 * kCount);
  const int64_t groups = ceil_of(p.heads, kHeads), count = int64_t(p.batch) * p.length * groups * units;
  if (count == 0) return QF_OK;
  if (count > 0x7fffffff) return QF_UNSUPPORTED;  // counted in 32 bits
  const Deal deal = {unsigned(rotated), unsigned(units), unsigned(groups), unsigned(count)};
  const Launch how = {ceil_of(count, kThreads), kThreads, 0, stream, kOverlaps};
  return launch(how, p.rope.interleaved ? qf_rope_kernel<kCount, true> : qf_rope_kernel<kCount, false>, p, deal);
}

}  // namespace rope
}  // namespace qf

QF_EXPORT int64_t qf_rope_workspace(const QfRopeParams*) { return 0; }

QF_EXPORT int qf_rope(const QfRopeParams* params, void* stream) {
  using namespace qf::rope;
  if (params->struct_bytes != int32_t(sizeof *params)) return QF_BAD_ABI;
  if (!is_served(*params)) return QF_UNSUPPORTED;
  QfRopeParams p = *params;
  if (p.positions) p.rope.positions_k = p.positions, p.rope.stride_positions_k_b = p.stride_positions_b;
  const auto on = static_cast<cudaStream_t>(stream);
  return vectorises(p) ? run<kVector>(p, on) : run<1>(p, on);
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text("rope", status, ", or its tables are missing or rotate more channels than there are");
}
