// C entry of `sm90_decode`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16), bucket of head dims (-DQF_HEAD_DIM) and kind
// of K and V (-DQF_KV_KIND: QF_KV_ARRAYS or QF_KV_PAGES): relayout what must be (rope, strides that TMA cannot walk),
// make tensor maps, attend.
#include "attn/entry.cuh"
#include "attn/wgmma/relayout.cuh"
#include "kernels/attention/sm90_decode/kernel.cuh"

// The pass before, for rotated tensors and strides that TMA cannot walk.
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
constexpr bool kPaged = QF_KV_KIND == QF_KV_PAGES;
constexpr wgmma::Which kLastRelaid = kPaged ? wgmma::kQ : wgmma::kV;  // pages are taken as they are
template <int kRowWarps>
using Config = sm90_decode::Config<Element, QF_HEAD_DIM, kRowWarps, kPaged>;
constexpr int kMostProcessors = 144;  // of any GPU of this architecture
constexpr int64_t kTooManyTiles = 1 << 30;

int rows_of(const QfAttnParams& p) { return p.kv_heads > 0 ? p.q_len * (p.q_heads / p.kv_heads) : 0; }
// Places of a unit where every key is there.
int64_t most_places(const QfAttnParams& p) { return p.k_len / Config<1>::kBlockN + 1; }
// As many runs as there are multiprocessors for, and no more than there are tiles.
decode::Runs runs_of(const QfAttnParams& p, int processors) {
  decode::Runs runs{};
  runs.chunk = unsigned(decode::chunk_heads(p.kv_heads));
  runs.chunks = unsigned(p.kv_heads) / runs.chunk;
  const int64_t fit = processors < int(runs.chunk) ? 1 : processors / runs.chunk;
  const int64_t most = int64_t(p.batch) * runs.chunks * most_places(p);
  runs.count = unsigned(fit < most ? fit : most);
  return runs;
}
int64_t blocks_of(const QfAttnParams& p, int processors) {
  const decode::Runs runs = runs_of(p, processors);
  return int64_t(runs.count) * runs.chunk;
}

// In the workspace: flags, partial sums, copies.
constexpr int64_t kFlagBytes = sizeof(unsigned) * decode::kFlagsEach;
int64_t partial_bytes(const QfAttnParams& p) {
  return 2 * sizeof(float) * decode::Partials::floats(blocks_of(p, kMostProcessors), rows_of(p), p.head_dim);
}

// Keys that a page and a tile have whole numbers of.
int box_rows_of(int page_size, int tile) {
  while (page_size % tile != 0) tile /= 2;
  return tile;
}
// Pages take the place of the batch.
template <class Tile>
int map_pages(CUtensorMap& map, const QfAttnParams& p, const QfTensor& pool, int box_rows,
              CUtensorMapL2promotion promotion) {
  if (p.kv.pages == 0) return cudaSuccess;  // never read
  const TensorExtents extents = wgmma::extents_of(pool, p.head_dim, p.kv.page_size, p.kv_heads, p.kv.pages);
  return encode_tensor_map<Tile>(map, extents, box_rows, promotion);
}
bool pages_map(const QfAttnParams& p) {
  for (const QfTensor* pool : {&p.kv.k, &p.kv.v}) {
    const TensorExtents extents = wgmma::extents_of(*pool, p.head_dim, p.kv.page_size, p.kv_heads, p.kv.pages);
    if (reinterpret_cast<uintptr_t>(pool->data) % 16 != 0 || !strides_map(extents, 2)) return false;
  }
  return p.kv.page_size % 16 == 0;
}

template <class Config>
int attend(const QfAttnParams& p, cudaStream_t stream) {
  using namespace decode;
  const wgmma::Relayout reserved(p, false, wgmma::kQ, kLastRelaid), relayout(p, true, wgmma::kQ, kLastRelaid);
  const int64_t partials = partial_bytes(p), needed = kFlagBytes + partials + reserved.bytes;
  if (!p.workspace || p.workspace_bytes < needed) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  Runs runs = runs_of(p, processors < kMostProcessors ? processors : kMostProcessors);
  if (!p.kv_lens) {  // all sequences are as long
    const Mask mask = {p.window_left, p.window_right, p.q_len, p.k_len};
    const KeyRange seen = mask.seen_by_any(0, p.q_len - 1);
    const int first = seen.begin / Config::kBlockN * Config::kBlockN;
    const int tiles = (seen.end - first + Config::kBlockN - 1) / Config::kBlockN;
    runs.places = seen.begin == seen.end ? 1 : tiles;
    runs.each = unsigned((int64_t(p.batch) * runs.chunks * runs.places + runs.count - 1) / runs.count);
  }
  const int64_t blocks = int64_t(runs.count) * runs.chunk;
  char* const workspace = static_cast<char*>(p.workspace);
  Borrowed borrowed{stream};  // for addresses that nobody could plan for
  if (relayout.bytes > reserved.bytes)
    if (const cudaError_t error = borrowed.take(relayout.bytes)) return error;
  char* const copies = borrowed.memory ? static_cast<char*>(borrowed.memory) : workspace + kFlagBytes + partials;
  if (relayout.bytes > 0)
    if (const int status =
            launch({3 * relayout.blocks(processors), wgmma::kRelayoutThreads, 0, stream},
                   qf_sm90_decode_relayout_kernel<Element>, p, relayout, copies, rope_tables_vectorise(p.rope)))
      return status;
  TensorMaps maps{};
  using Tile = typename Config::Tile;
  // Rows of a panel are 128 bytes. To fetch 256, as elsewhere, costs 6 % here, where nothing else is waited for.
  constexpr auto promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  int box_rows = Config::kBlockN;
  if constexpr (kPaged) {
    box_rows = box_rows_of(p.kv.page_size, Config::kBlockN);
    if (const int error = map_pages<Tile>(maps.k, p, p.kv.k, box_rows, promotion)) return error;
    if (const int error = map_pages<Tile>(maps.v, p, p.kv.v, box_rows, promotion)) return error;
  } else {
    if (const int error = relayout.map<Tile>(maps.k, wgmma::kK, copies, p.head_dim, box_rows, promotion)) return error;
    if (const int error = relayout.map<Tile>(maps.v, wgmma::kV, copies, p.head_dim, box_rows, promotion)) return error;
  }
  Flags flags{};
  if (const int error = take_flags(stream, int(blocks), reinterpret_cast<unsigned*>(workspace), flags)) return error;
  const wgmma::RelaidTensor& q = relayout.tensors[wgmma::kQ];
  const QfTensor queries = q.copied ? q.copy(copies, p.head_dim) : q.from;
  float* const sums = reinterpret_cast<float*>(workspace + kFlagBytes);
  const Partials parts = {sums, sums + Partials::floats(blocks, rows_of(p), p.head_dim), rows_of(p), p.head_dim,
                          nullptr};
  return launch({blocks, Config::kThreads, Config::kSharedBytes, stream, true}, qf_sm90_decode_kernel<Config>, p,
                queries, maps, runs, parts, flags, q.copied || q.vector, chunks_aligned(p.out, p.head_dim, 2),
                box_rows);
}

}  // namespace

QF_EXPORT int64_t qf_sm90_decode_workspace(const QfAttnParams* p) {
  return kFlagBytes + partial_bytes(*p) + wgmma::Relayout(*p, false, wgmma::kQ, kLastRelaid).bytes;
}

QF_EXPORT int qf_sm90_decode(const QfAttnParams* p, void* stream) {
  if (const int status = kPaged ? check_pages(p, QF_DTYPE) : check_arrays(p, QF_DTYPE)) return status;
  if (kPaged && !pages_map(*p)) return QF_UNSUPPORTED;
  if (p->head_dim < 1 || p->head_dim > QF_HEAD_DIM || p->head_dim % 8 != 0 || p->cu_seqlens_q) return QF_UNSUPPORTED;
  const int rows = rows_of(*p);
  if (rows > decode::kMostRows || int64_t(p->batch) * p->kv_heads * most_places(*p) >= kTooManyTiles)
    return QF_UNSUPPORTED;
  if (rows == 0 || p->batch == 0) return QF_OK;
  const auto on = static_cast<cudaStream_t>(stream);
  if (rows <= 16) return attend<Config<1>>(*p, on);
  return rows <= 32 ? attend<Config<2>>(*p, on) : attend<Config<4>>(*p, on);
}

QF_EXPORT const char* qf_status_text(int status) {
  return qf::status_text(
      "sm90_decode", status,
      ", packed arrays, more than 64 rows of a KV head, or pages whose tokens and heads are not whole 16 bytes apart");
}
