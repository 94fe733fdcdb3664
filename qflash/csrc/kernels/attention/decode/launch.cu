// C entry of `decode`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16), bucket of head dims (-DQF_HEAD_DIM), architecture
// (-DQF_ARCH) and kind of K and V (-DQF_KV_KIND: QF_KV_ARRAYS, QF_KV_KEPT, QF_KV_PAGES or QF_KV_PAGES_INT8), with
// batch-invariant results or not (-DQF_BATCH_INVARIANT).
#include "attn/decode/runs.h"
#include "attn/entry.cuh"
#include "kernels/attention/decode/kernel.cuh"

namespace {

using namespace qf;
template <int kRowWarps>
using Config =
    decode::PortableConfig<ElementOf<QF_DTYPE>::Type, QF_HEAD_DIM, kRowWarps, QF_ARCH, QF_KV_KIND, QF_BATCH_INVARIANT>;
constexpr int kMostProcessors = 256;  // on any GPU

// In the workspace: flags, partial results.
constexpr int64_t kFlagBytes = sizeof(unsigned) * decode::kFlagsEach;
template <class Config>
int64_t partial_bytes(const QfAttnParams& p) {
  return decode::partial_bytes<Config::kBlockN>(p, kMostProcessors);
}

template <class Config>
int attend(const QfAttnParams& p, cudaStream_t stream) {
  using namespace decode;
  if (too_many_tiles<Config::kBlockN>(p)) return QF_UNSUPPORTED;
  if (!p.workspace || p.workspace_bytes < kFlagBytes + ::partial_bytes<Config>(p)) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  const Runs runs = runs_of<Config::kBlockN>(p, processors < kMostProcessors ? processors : kMostProcessors);
  const int64_t blocks = blocks_of(runs);
  char* const workspace = static_cast<char*>(p.workspace);
  Flags flags{};
  if (const int error = take_flags(stream, int(blocks), reinterpret_cast<unsigned*>(workspace), flags)) return error;
  const Partials parts = partials_in<Config::kBlockN>(reinterpret_cast<float*>(workspace + kFlagBytes), p, runs);
  const auto whole = [&](const QfTensor& x, int bytes) { return chunks_aligned(x, p.head_dim, bytes); };
  const int key_columns = Config::kKept ? int(kept_width(p.head_dim)) : p.head_dim;
  const Aligned aligned = {whole(p.q, 2), chunks_aligned(p.kv.k, key_columns, Config::kKeyBytes),
                           whole(p.kv.v, Config::kElementBytes), whole(p.out, 2), rope_tables_vectorise(p.rope)};
  const bool overlaps = QF_ARCH >= 90 && !flags.was_cleared();
  const Launch how = {blocks, Config::kThreads, Config::kSharedBytes, stream, overlaps};
  constexpr bool kCanCopyAsync = QF_ARCH >= 80;
  const bool rotates_keys = QF_KV_KIND == QF_KV_ARRAYS && p.rope.cos;
  if (kCanCopyAsync && aligned.k && aligned.v && !rotates_keys)
    return launch(how, qf_decode_kernel<Config, kCanCopyAsync>, p, runs, parts, flags, aligned);
  return launch(how, qf_decode_kernel<Config, false>, p, runs, parts, flags, aligned);
}

// visit(a Config): the one for `rows` rows of a KV head.
template <class Visit>
auto by_rows(int rows, Visit visit) {
  if (rows <= 16) return visit(Config<1>());
  return rows <= 32 ? visit(Config<2>()) : visit(Config<4>());
}

}  // namespace

QF_EXPORT int64_t qf_decode_workspace(const QfAttnParams* p) {
  return by_rows(decode::rows_of(*p), [&](auto config) { return kFlagBytes + partial_bytes<decltype(config)>(*p); });
}

QF_EXPORT int qf_decode(const QfAttnParams* p, void* stream) {
  if (const int status = check_kv<QF_KV_KIND>(p, QF_DTYPE)) return status;
  if (p->head_dim < 1 || p->head_dim > QF_HEAD_DIM || p->head_dim % 8 != 0 || p->cu_seqlens_q) return QF_UNSUPPORTED;
  const int rows = decode::rows_of(*p);
  if (rows > decode::kMostRows || p->batch_invariant != QF_BATCH_INVARIANT) return QF_UNSUPPORTED;
  if (rows == 0 || p->batch == 0) return QF_OK;
  return by_rows(rows, [&](auto config) { return attend<decltype(config)>(*p, static_cast<cudaStream_t>(stream)); });
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text("decode", status,
                         ", packed arrays, more than 64 rows of a KV head, or scales of int8 pages that do not lie "
                         "at whole 16 bytes");
}
