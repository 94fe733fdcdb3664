// C entry of `sm90_bwd`, for one type (-DQF_DTYPE: QF_F16 or QF_BF16) and bucket of head dims (-DQF_HEAD_DIM): copies
// what TMA cannot address, computes delta and the gradient of sinks, then dK and dV, and dQ from the dS that their
// kernel stored, as many heads at a time as the workspace has room for. If it has none, dQ comes first, from recomputed
// S and dP, then dK and dV.
#include "attn/backward/entry.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/plain_scores.h"
#include "kernels/attention_backward/sm90_bwd/kernel.cuh"

namespace {

using namespace qf;
using namespace wgmma::backward;
using Element = ElementOf<QF_DTYPE>::Type;
using sm90_bwd::kKeys, sm90_bwd::kQueries, sm90_bwd::kQueriesFromDs, sm90_bwd::Of;
using wgmma::kK, wgmma::kQ, wgmma::kV, wgmma::Relayout;

// The workspace: delta, then one counter of work tiles per kernel, then dS, then copies.
struct Workspace {
  static constexpr int64_t kCounterBytes = 256;
  DsTiles tiles;
  int64_t counters_at, ds_at, copies_at;

  static constexpr bool kStoresDs = sm90_bwd::Config<Element, kKeys, true>::kStoresDs;

  explicit Workspace(const QfAttnBwdParams& params) : tiles(ds_tiles(params.fwd, kStoresDs ? params.ds_bytes : 0)) {
    const QfAttnParams& p = params.fwd;
    counters_at = (delta_bytes(p) + 255) / 256 * 256;
    ds_at = counters_at + 2 * kCounterBytes;
    copies_at = ds_at + (tiles.columns > 0 ? tiles.bytes(p.q_heads / p.kv_heads) : 0);
  }
};

// How dO is passed to TMA: like q, but never rotated.
QfAttnParams with_dout(const QfAttnBwdParams& params) {
  QfAttnParams p = params.fwd;
  p.q = params.dout;
  p.rope = {};
  return p;
}

// The copies that a call makes before its MMAs. addressed: as for Relayout.
struct Copies {
  Relayout inputs, dout;

  Copies(const QfAttnBwdParams& params, bool addressed)
      : inputs(params.fwd, addressed), dout(with_dout(params), addressed, kQ, kQ) {}
  int64_t bytes() const { return inputs.bytes + dout.bytes; }
};

int copy(const Relayout& relayout, const QfAttnParams& p, char* memory, int processors, cudaStream_t stream) {
  if (relayout.bytes == 0) return QF_OK;
  return launch({3 * relayout.blocks(processors), wgmma::kRelayoutThreads, 0, stream},
                qf_sm90_bwd_relayout_kernel<Element>, p, relayout, memory, rope_tables_vectorise(p.rope));
}

// What all launches of a call share.
struct Call {
  const QfAttnBwdParams& params;
  const Copies& copies;
  char* memory;  // for copies
  int processors;
  cudaStream_t stream;
};

// One of the kernels, for `pairs` (sequence, KV head) pairs. counter: in the workspace, for a call that gets none of
// the library's.
template <class Config>
int run(const Call& call, const DsMemory& ds, int64_t pairs, unsigned* counter) {
  const auto& [params, copies, memory, processors, stream] = call;
  const QfAttnParams& p = params.fwd;
  TileSchedule schedule = schedule_of<Config>(p, pairs);
  if (schedule.count == 0) return QF_OK;
  if (schedule.count == schedule.kTooMany) return QF_UNSUPPORTED;
  if (schedule.count <= processors) schedule.dynamic = false;  // at most one per block
  if (schedule.dynamic) {
    if (const int error = take_tile_counter(stream, schedule.counter)) return error;
    schedule.next = counter;
    if (schedule.counter < 0)
      if (const cudaError_t error = cudaMemsetAsync(counter, 0, sizeof(unsigned), stream)) return error;
  }
  TensorMaps maps{};
  char* const dout = memory + copies.inputs.bytes;
  using Rows = typename Config::RowTile;
  using Columns = typename Config::ColumnTile;
  using KeyTile = std::conditional_t<Config::kKeysStay, Rows, Columns>;
  using QueryTile = std::conditional_t<Config::kKeysStay, Columns, Rows>;
  constexpr int kKeyRows = Config::kKeysStay ? Config::kBlockM : Config::kBlockN;
  constexpr int kQueryRows = Config::kKeysStay ? Config::kBlockN : Config::kBlockM;
  CUtensorMap& k = Config::kKeysStay ? maps.first_rows : maps.first_columns;
  CUtensorMap& v = Config::kKeysStay ? maps.second_rows : maps.second_columns;
  CUtensorMap& q = Config::kKeysStay ? maps.first_columns : maps.first_rows;
  CUtensorMap& d = Config::kKeysStay ? maps.second_columns : maps.second_rows;
  if (const int error = copies.inputs.map<KeyTile>(k, kK, memory, p.head_dim, kKeyRows)) return error;
  if constexpr (!Config::kFromDs) {
    if (const int error = copies.inputs.map<KeyTile>(v, kV, memory, p.head_dim, kKeyRows)) return error;
    if (const int error = copies.inputs.map<QueryTile>(q, kQ, memory, p.head_dim, kQueryRows)) return error;
    if (const int error = copies.dout.map<QueryTile>(d, kQ, dout, p.head_dim, kQueryRows)) return error;
  }
  const auto aligned = [&](const QfTensor& x) { return chunks_aligned(x, p.head_dim, 2); };
  const Stores stores = {aligned(Config::kKeysStay ? params.dk : params.dq), aligned(params.dv)};
  const int blocks = schedule.count < processors ? schedule.count : processors;
  return launch({blocks, Config::kThreads, Config::kSharedBytes, stream}, qf_sm90_bwd_kernel<Config>, params, maps,
                schedule, ds, stores);
}

template <bool kPlain>
int differentiate(const QfAttnBwdParams& params, cudaStream_t stream) {
  const QfAttnParams& p = params.fwd;
  const Workspace layout(params);
  const Copies reserved(params, false), copies(params, true);
  if (!params.workspace || params.workspace_bytes < layout.copies_at + reserved.bytes()) return QF_NO_MEMORY;
  int processors = 0;
  if (const int error = multiprocessors(processors)) return error;
  Borrowed borrowed{stream};  // for copies that become necessary once addresses are known
  if (copies.bytes() > reserved.bytes())
    if (const cudaError_t error = borrowed.take(copies.bytes())) return error;
  char* const workspace = static_cast<char*>(params.workspace);
  char* const memory = borrowed.memory ? static_cast<char*>(borrowed.memory) : workspace + layout.copies_at;
  if (const int status = copy(copies.inputs, p, memory, processors, stream)) return status;
  if (const int status = copy(copies.dout, with_dout(params), memory + copies.inputs.bytes, processors, stream))
    return status;
  if (const int status =
          launch_delta(qf_sm90_bwd_delta_kernel<Element>, qf_sm90_bwd_few_kernel<Element>, params, stream))
    return status;
  if (const int status = launch_sink_gradient(qf_sm90_bwd_sinks_kernel, params, stream)) return status;
  const Call call = {params, copies, memory, processors, stream};
  unsigned* const counter = reinterpret_cast<unsigned*>(workspace + layout.counters_at);
  unsigned* const other = counter + Workspace::kCounterBytes / sizeof(unsigned);
  const int64_t pairs = int64_t(p.batch) * p.kv_heads;
  if (layout.tiles.columns == 0) {
    if (const int status = run<sm90_bwd::Config<Element, kQueries, kPlain>>(call, {}, pairs, counter)) return status;
    return run<sm90_bwd::Config<Element, kKeys, kPlain>>(call, {}, pairs, other);
  }
  if constexpr (Workspace::kStoresDs) {
    DsMemory ds = {workspace + layout.ds_at, layout.tiles, 0};
    for (int64_t first = 0; first < pairs; first += ds.tiles.columns) {
      ds.first_column = int(first);
      const int64_t some = pairs - first < ds.tiles.columns ? pairs - first : ds.tiles.columns;
      if (const int status = run<sm90_bwd::Config<Element, kKeys, kPlain>>(call, ds, some, counter)) return status;
      if (const int status = run<sm90_bwd::Config<Element, kQueriesFromDs, true>>(call, ds, some, other)) return status;
    }
  }
  return QF_OK;
}

}  // namespace

QF_EXPORT int64_t qf_sm90_bwd_workspace(const QfAttnBwdParams* params) {
  return Workspace(*params).copies_at + Copies(*params, false).bytes();
}

QF_EXPORT int qf_sm90_bwd(const QfAttnBwdParams* params, void* stream) {
  if (const int status = check_backward(params, QF_DTYPE)) return status;
  const QfAttnParams& p = params->fwd;
  if (p.head_dim < 1 || p.head_dim > QF_HEAD_DIM || p.head_dim % 8 != 0) return QF_UNSUPPORTED;
  return by_scores(scales_plainly(p.scale, p.softcap), [&](auto plain) {
    return differentiate<decltype(plain)::value>(*params, static_cast<cudaStream_t>(stream));
  });
}

QF_EXPORT const char* qf_status_text(int status) { return status_text("sm90_bwd", status); }
