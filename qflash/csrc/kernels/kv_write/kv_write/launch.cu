// C entry of `kv_write`.
#include "common/launch.cuh"
#include "kernels/kv_write/kv_write/config.h"
#include "kernels/kv_write/kv_write/kernel.cuh"

namespace qf {
namespace kv_write {

constexpr int kBytes = int(sizeof(Element));

bool is_served(const QfKvWriteParams& p) {
  const bool int8 = p.kv.kind == QF_KV_PAGES_INT8;
  if (p.dtype != QF_DTYPE || (!int8 && p.kv.kind != QF_KV_PAGES)) return false;
  const int stored = int8 ? int(QF_I8) : int(QF_DTYPE);
  if (p.kv.k_dtype != stored || p.kv.v_dtype != stored) return false;
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim || (int8 && p.head_dim % 16 != 0)) return false;
  // An array without elements has no address in PyTorch.
  if (int8 && p.kv.pages > 0 && (!p.kv.k_scales.scale || !p.kv.v_scales.scale)) return false;
  const bool has_tables = p.batch <= 0 || (p.kv_lens && (p.kv.page_table || p.columns == 0));
  return p.kv_heads >= 1 && p.kv.page_size >= 1 && has_tables && p.columns >= 0 && p.k_len <= kMaxLength;
}

bool is_aligned(const QfTensor& x, int bytes, int vector_bytes) {
  const int64_t n = vector_bytes / bytes;
  return reinterpret_cast<uintptr_t>(x.data) % vector_bytes == 0 && x.stride_b % n == 0 && x.stride_t % n == 0 &&
         x.stride_h % n == 0;
}

// May everything be read and written sixteen bytes at a time?
bool vectorises(const QfKvWriteParams& p) {
  const int stored = p.kv.kind == QF_KV_PAGES_INT8 ? 1 : kBytes;
  return p.head_dim % 8 == 0 && is_aligned(p.k, kBytes, 16) && is_aligned(p.v, kBytes, 16) &&
         is_aligned(p.kv.k, stored, 16) && is_aligned(p.kv.v, stored, 16) &&
         reinterpret_cast<uintptr_t>(p.kv.k_mean) % 16 == 0;
}

template <bool kInt8>
int run(const QfKvWriteParams& p, int64_t tokens, cudaStream_t stream) {
  Deal deal{};
  while ((kChannels << deal.log_lanes) < p.head_dim) ++deal.log_lanes;
  const int64_t units = 2 * tokens * p.kv_heads, blocks = ceil_of(units << deal.log_lanes, kThreads);
  // Threads are counted in 32 bits, too.
  if (tokens > kMaxLength || units > kMaxLength || blocks > kMostBlocks / kThreads) return QF_UNSUPPORTED;
  deal.units = uint32_t(units);
  deal.heads = divider(uint32_t(p.kv_heads));
  deal.length = divider(uint32_t(p.cu_seqlens_k ? 1 : p.k_len));
  deal.page_size = divider(uint32_t(p.kv.page_size));
  deal.table_vectors = p.rope.cos && rotate_vectorises(p.rope);
  const Launch how = {blocks, kThreads, 0, stream, kOverlaps};
  auto* const kernel =
      vectorises(p) ? qf_kv_write_kernel<Element, kInt8, true> : qf_kv_write_kernel<Element, kInt8, false>;
  return launch(how, kernel, p, deal);
}

}  // namespace kv_write
}  // namespace qf

QF_EXPORT int64_t qf_kv_write_workspace(const QfKvWriteParams*) { return 0; }

QF_EXPORT int qf_kv_write(const QfKvWriteParams* p, void* stream) {
  if (p->struct_bytes != int32_t(sizeof *p)) return QF_BAD_ABI;
  const int64_t tokens = p->cu_seqlens_k ? p->total_k : int64_t(p->batch) * p->k_len;
  if (!qf::kv_write::is_served(*p)) return QF_UNSUPPORTED;
  if (tokens <= 0 || p->batch <= 0) return QF_OK;
  const auto on = static_cast<cudaStream_t>(stream);
  return p->kv.kind == QF_KV_PAGES_INT8 ? qf::kv_write::run<true>(*p, tokens, on)
                                        : qf::kv_write::run<false>(*p, tokens, on);
}

QF_EXPORT const char* qf_status_text(int status) { return qf::status_text("kv_write", status); }
