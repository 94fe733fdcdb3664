// C entry of `sm90_decode`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16), bucket of head dims (-DQF_HEAD_DIM) and kind
// of K and V (-DQF_KV_KIND: QF_KV_ARRAYS, QF_KV_KEPT, QF_KV_PAGES or QF_KV_PAGES_INT8), with batch-invariant results or
// not (-DQF_BATCH_INVARIANT): relays out what needs it of K and V in arrays (K with rope, strides that TMA cannot
// address), makes tensor maps, attends.
#include "attn/decode/runs.h"
#include "attn/entry.cuh"
#include "attn/wgmma/relayout.cuh"
#include "kernels/attention/sm90_decode/kernel.cuh"

// The relayout pass, for rotated keys and strides that TMA cannot address. Neither q nor pages need it: the warp that
// loads q rotates it and reads any strides, and keys in pages were rotated when they were written.
template <class Element>
__global__ void __launch_bounds__(qf::wgmma::kRelayoutThreads)
    qf_sm90_decode_relayout_kernel(const __grid_constant__ QfAttnParams p,
                                   const __grid_constant__ qf::wgmma::Relayout relayout, char* const copies,
                                   const bool tables_vectorise) {
  qf::wgmma::relayout_tokens<Element>(p, relayout, copies, tables_vectorise);
}

namespace {

using namespace qf;
using Element = ElementOf<QF_DTYPE>::Type;
constexpr bool kKept = QF_KV_KIND == QF_KV_KEPT, kPaged = !kKept && QF_KV_KIND != QF_KV_ARRAYS;
// Pages are read in place, and a quantized K is contiguous.
constexpr auto kFirstRelaid = wgmma::Which(kPaged ? wgmma::kV + 1 : kKept ? wgmma::kV : wgmma::kK);
template <int kRowWarps>
using Config = sm90_decode::Config<Element, QF_HEAD_DIM, kRowWarps, QF_KV_KIND, QF_BATCH_INVARIANT>;
constexpr int kMostProcessors = 144;         // of any GPU of this architecture
constexpr int kBlockN = Config<1>::kBlockN;  // for any number of rows

// The workspace: flags, partial results, copies.
constexpr int64_t kFlagBytes = sizeof(unsigned) * decode::kFlagsEach;
int64_t partial_bytes(const QfAttnParams& p) { return decode::partial_bytes<kBlockN>(p, kMostProcessors); }

// K as written by quantize_kv.
template <class Tile>
int map_kept(CUtensorMap& map, const QfAttnParams& p, int box_rows, CUtensorMapL2promotion promotion) {
  if (p.k_len == 0) return cudaSuccess;  // never read
  const TensorExtents extents = wgmma::extents_of(p.kv.k, kept_width(p.head_dim), p.k_len, p.kv_heads, p.batch);
  return encode_tensor_map<Tile>(map, extents, box_rows, promotion);
}
// The largest box that divides both a page and a tile of keys.
[[maybe_unused]] int box_rows_of(int page_size, int tile) {
  while (page_size % tile != 0) tile /= 2;
  return tile;
}
// The page index takes the place of the batch.
template <class Tile>
int map_pages(CUtensorMap& map, const QfAttnParams& p, const QfTensor& pool, int box_rows,
              CUtensorMapL2promotion promotion) {
  if (p.kv.pages == 0) return cudaSuccess;  // never read
  const TensorExtents extents = wgmma::extents_of(pool, p.head_dim, p.kv.page_size, p.kv_heads, p.kv.pages);
  return encode_tensor_map<Tile>(map, extents, box_rows, promotion);
}
[[maybe_unused]] bool pages_map(const QfAttnParams& p) {
  constexpr int kElementBytes = QF_KV_KIND == QF_KV_PAGES_INT8 ? 1 : 2;
  for (const QfTensor* pool : {&p.kv.k, &p.kv.v}) {
    const TensorExtents extents = wgmma::extents_of(*pool, p.head_dim, p.kv.page_size, p.kv_heads, p.kv.pages);
    if (reinterpret_cast<uintptr_t>(pool->data) % 16 != 0 || !strides_map(extents, kElementBytes)) return false;
  }
  return p.kv.page_size % 16 == 0;
}

template <class Config>
int attend(const QfAttnParams& p, cudaStream_t stream) {
  using namespace decode;
  static_assert(Config::kBlockN == kBlockN, "");
  const wgmma::Relayout reserved(p, false, kFirstRelaid), relayout(p, true, kFirstRelaid);
  const int64_t partials = ::partial_bytes(p), needed = kFlagBytes + partials + reserved.bytes;
  if (!p.workspace || p.workspace_bytes < needed) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  const Runs runs = runs_of<kBlockN>(p, processors < kMostProcessors ? processors : kMostProcessors);
  const int64_t blocks = blocks_of(runs);
  char* const workspace = static_cast<char*>(p.workspace);
  const bool tables_aligned = rope_tables_vectorise(p.rope);
  Borrowed borrowed{stream};  // for copies that become necessary once addresses are known
  TensorMaps maps{};
  using Tile = typename Config::Tile;
  // Rows of a panel are 128 bytes. A promotion to 256, as elsewhere, costs 6 % here, where memory is the only bound.
  constexpr auto promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  int box_rows = Config::kBlockN;
  if constexpr (kPaged) {  // nothing is copied
    box_rows = box_rows_of(p.kv.page_size, Config::kBlockN);
    if (const int error = map_pages<Tile>(maps.k, p, p.kv.k, box_rows, promotion)) return error;
    if (const int error = map_pages<Tile>(maps.v, p, p.kv.v, box_rows, promotion)) return error;
  } else {
    if (relayout.bytes > reserved.bytes)
      if (const cudaError_t error = borrowed.take(relayout.bytes)) return error;
    char* const copies = borrowed.memory ? static_cast<char*>(borrowed.memory) : workspace + kFlagBytes + partials;
    if (relayout.bytes > 0)
      if (const int status = launch({3 * relayout.blocks(processors), wgmma::kRelayoutThreads, 0, stream},
                                    qf_sm90_decode_relayout_kernel<Element>, p, relayout, copies, tables_aligned))
        return status;
    if (const int error = kKept ? map_kept<typename Config::KeyTile>(maps.k, p, box_rows, promotion)
                                : relayout.map<Tile>(maps.k, wgmma::kK, copies, p.head_dim, box_rows, promotion))
      return error;
    if (const int error = relayout.map<Tile>(maps.v, wgmma::kV, copies, p.head_dim, box_rows, promotion)) return error;
  }
  Flags flags{};
  if (const int error = take_flags(stream, int(blocks), reinterpret_cast<unsigned*>(workspace), flags)) return error;
  const Partials parts = partials_in<kBlockN>(reinterpret_cast<float*>(workspace + kFlagBytes), p, runs);
  // TMA reads K and V, which are 16-byte aligned.
  const Aligned aligned = {chunks_aligned(p.q, p.head_dim, 2), true, true, chunks_aligned(p.out, p.head_dim, 2),
                           tables_aligned};
  const Launch how = {blocks, Config::kThreads, Config::kSharedBytes, stream, !flags.was_cleared()};
  return launch(how, qf_sm90_decode_kernel<Config>, p, maps, runs, parts, flags, aligned, box_rows);
}

}  // namespace

QF_EXPORT int64_t qf_sm90_decode_workspace(const QfAttnParams* p) {
  return kFlagBytes + partial_bytes(*p) + wgmma::Relayout(*p, false, kFirstRelaid).bytes;
}

QF_EXPORT int qf_sm90_decode(const QfAttnParams* p, void* stream) {
  if (const int status = check_kv<QF_KV_KIND>(p, QF_DTYPE)) return status;
  if (p->batch_invariant != QF_BATCH_INVARIANT) return QF_UNSUPPORTED;
  if (kPaged && !pages_map(*p)) return QF_UNSUPPORTED;
  if (kKept && reinterpret_cast<uintptr_t>(p->kv.k.data) % 16 != 0) return QF_UNSUPPORTED;
  if (p->head_dim < 1 || p->head_dim > QF_HEAD_DIM || p->head_dim % 8 != 0 || p->cu_seqlens_q) return QF_UNSUPPORTED;
  const int rows = decode::rows_of(*p);
  if (rows > decode::kMostRows || decode::too_many_tiles<kBlockN>(*p)) return QF_UNSUPPORTED;
  if (rows == 0 || p->batch == 0) return QF_OK;
  const auto on = static_cast<cudaStream_t>(stream);
  if (rows <= 16) return attend<Config<1>>(*p, on);
  return rows <= 32 ? attend<Config<2>>(*p, on) : attend<Config<4>>(*p, on);
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text("sm90_decode", status,
                         ", packed arrays, more than 64 rows of a KV head, pages or QuantizedKV of which some row "
                         "begins at no whole 16 bytes (kernel='decode' takes those)");
}
