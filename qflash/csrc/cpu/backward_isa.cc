// The backward kernels of one instruction set: loading and storing rows as packed float32, and the table of entries.

#include <math.h>

#include "backward_tile.inl"
#include "rows.h"

namespace qf {
namespace QF_ISA {

static inline int pitch_of(const QfAttnParams& p) { return (p.head_dim + kLanes - 1) / kLanes * kLanes; }

// One row as float32, zero from n to pitch.
static inline void load_padded(float* to, const void* from, int32_t dtype, int n, int pitch) {
  store(to + pitch - kLanes, zero());
  load_row(to, from, dtype, n);
}

static inline void set_zero(float* x, int64_t n) { memset(x, 0, size_t(n) * sizeof(float)); }

static inline WeightMap weight_map(const QfAttnParams& p) {
  const bool capped = p.softcap != 0.0f;
  return {(capped ? p.softcap : p.scale) * kLog2e, capped ? p.scale / p.softcap : 0.0f};
}

// Up to this many keys a row's rowsum(dout * out) is computed as rowsum(P * dP), which is equal where these are all
// keys of the row. The fewer keys there are, the more dP - delta cancels, and `out` as float16 or bfloat16 has too few
// digits for the difference. The sum is divided by that of the weights, which have the same error factor from the
// rounding of lse.
constexpr int64_t kFewKeys = 16;

// exp(sink - lse), where both may be infinite.
static double sink_weight(float sink, float lse) { return lse == sink ? 1.0 : ::exp(double(sink) - lse); }

static float delta_of_few(const QfAttnParams& p, const Sequence& s, int head, KeyRange keys, const float* q,
                          const float* dout, float lse, float minus_lse) {
  const int pitch = pitch_of(p);
  const int64_t kv_head = head / (p.q_heads / p.kv_heads);
  const WeightMap map = weight_map(p);
  alignas(64) float k[kMaxHeadDim], v[kMaxHeadDim];
  float delta = 0.0f, weights = p.sinks ? float(sink_weight(p.sinks[head], lse)) : 0.0f;
  for (int64_t key = keys.begin; key < keys.end; key++) {
    load_padded(k, row_address(p.kv.k, p.dtype, s.batch, s.first_k + key, kv_head), p.dtype, p.head_dim, pitch);
    rotate_row(k, p.rope, key_position(p, s, key));
    load_padded(v, row_address(p.kv.v, p.dtype, s.batch, s.first_k + key, kv_head), p.dtype, p.head_dim, pitch);
    const float score = dot_rows(q, k, pitch);
    const float capped = p.softcap != 0.0f ? tanhf(score * map.inverse_cap) : score;
    const float weight = exp2f(capped * map.factor + minus_lse);
    weights += weight;
    delta += weight * dot_rows(dout, v, pitch);
  }
  return delta / weights;
}

static void load_queries(const QfAttnBwdParams& params, const Sequence& s, int head, int64_t first, int count,
                         const QueryTile& tile) {
  const QfAttnParams& p = params.fwd;
  const int pitch = pitch_of(p), padded = (count + kBwdRowMultiple - 1) / kBwdRowMultiple * kBwdRowMultiple;
  const int64_t statistics = s.batch * p.lse_stride_b + head * p.lse_stride_h + s.first_q + first;
  FiniteCheck check;
  alignas(64) float out[kMaxHeadDim];
  for (int r = 0; r < count; r++) {
    const int64_t row = s.first_q + first + r;
    float *q = tile.q + r * pitch, *dout = tile.dout + r * pitch;
    load_padded(q, row_address(p.q, p.dtype, s.batch, row, head), p.dtype, p.head_dim, pitch);
    rotate_row(q, p.rope, query_position(p, s, first + r));
    load_padded(dout, row_address(params.dout, p.dtype, s.batch, row, head), p.dtype, p.head_dim, pitch);
    load_padded(out, row_address(p.out, p.dtype, s.batch, row, head), p.dtype, p.head_dim, pitch);
    const float lse = p.lse[statistics + r];
    tile.minus_lse[r] = lse == -INFINITY ? -INFINITY : -lse * kLog2e;
    const KeyRange keys = visible_keys(p, s, first + r);
    float delta = dot_rows(dout, out, pitch);
    if (p.dtype != QF_F32 && !params.partial && keys.begin < keys.end && keys.end - keys.begin <= kFewKeys) {
      // With an infinity in dout, terms of both signs may give NaN there, but not in rowsum(dout * out).
      const float few = delta_of_few(p, s, head, keys, q, dout, lse, tile.minus_lse[r]);
      if (few - few == 0.0f) delta = few;
    }
    tile.delta[r] = delta - (params.dlse ? params.dlse[statistics + r] : 0.0f);
    check.add_row(q, pitch);
    check.add_row(dout, pitch);
  }
  set_zero(tile.q + count * pitch, int64_t(padded - count) * pitch);
  set_zero(tile.dout + count * pitch, int64_t(padded - count) * pitch);
  for (int r = count; r < padded; r++) {
    tile.minus_lse[r] = -INFINITY;
    tile.delta[r] = 0.0f;
  }
  set_zero(tile.dq, int64_t(padded) * pitch);
  *tile.finite = check.finite();
}

// to[d][key] = from[key][d] for all kBwdBlock keys and all d up to pitch.
static void transpose_block(float* to, const float* from, int pitch) {
  for (int key = 0; key < kBwdBlock; key += kLanes)
    for (int d = 0; d < pitch; d += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) rows[i] = load(from + (key + i) * pitch + d);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) store(to + (d + i) * kBwdBlock + key, rows[i]);
    }
}

static void load_keys(const QfAttnBwdParams& params, const Sequence& s, int kv_head, int64_t first, int count,
                      KeyBlock& block) {
  const QfAttnParams& p = params.fwd;
  const int pitch = pitch_of(p);
  float* v = block.dv;  // rows of v are only needed until they are transposed
  FiniteCheck check;
  for (int j = 0; j < count; j++) {
    const int64_t row = s.first_k + first + j;
    load_padded(block.k + j * pitch, row_address(p.kv.k, p.dtype, s.batch, row, kv_head), p.dtype, p.head_dim, pitch);
    rotate_row(block.k + j * pitch, p.rope, key_position(p, s, first + j));
    load_padded(v + j * pitch, row_address(p.kv.v, p.dtype, s.batch, row, kv_head), p.dtype, p.head_dim, pitch);
    check.add_row(block.k + j * pitch, pitch);
  }
  set_zero(block.k + count * pitch, int64_t(kBwdBlock - count) * pitch);
  set_zero(v + count * pitch, int64_t(kBwdBlock - count) * pitch);
  transpose_block(block.k_t, block.k, pitch);
  transpose_block(block.v_t, v, pitch);
  set_zero(block.dk, int64_t(kBwdBlock) * pitch);
  set_zero(block.dv, int64_t(kBwdBlock) * pitch);
  block.finite = check.finite();
}

static void probabilities(const QfAttnBwdParams& params, const QueryTile& tile, const TileMask& mask,
                          const KeyBlock& block) {
  const QfAttnParams& p = params.fwd;
  const bool capped = p.softcap != 0.0f;
  const auto run = all_seen(mask) ? (capped ? score_tile<false, true> : score_tile<false, false>)
                                  : (capped ? score_tile<true, true> : score_tile<true, false>);
  run(weight_map(p), p.head_dim, pitch_of(p), tile, mask, block);
}

static void add_to_keys(const QfAttnBwdParams& params, const QueryTile& tile, const TileMask& mask,
                        const KeyBlock& block) {
  const int pitch = pitch_of(params.fwd);
  update<kBwdBlock, 1>(block.p, tile.dout, block.dv, pitch, mask.columns, mask, queries_seeing, *tile.finite);
  update<kBwdBlock, 1>(block.ds, tile.q, block.dk, pitch, mask.columns, mask, queries_seeing, *tile.finite);
}

static void add_to_queries(const QfAttnBwdParams& params, const QueryTile& tile, const TileMask& mask,
                           const KeyBlock& block) {
  update<1, kBwdBlock>(block.ds, block.k, tile.dq, pitch_of(params.fwd), mask.rows, mask, keys_seen, block.finite);
}

static inline void scale_row(float* x, int pitch, float scale) {
  for (int d = 0; d < pitch; d += kLanes) store(x + d, load(x + d) * broadcast(scale));
}

static void clear_rows(const QfAttnParams& p, const QfTensor& t, const Sequence& s, int64_t first, int count,
                       int head) {
  for (int64_t row = first; row < first + count; row++)  // zero is all bits zero in every dtype
    memset(row_address(t, p.dtype, s.batch, row, head), 0, size_t(p.head_dim * element_bytes(p.dtype)));
}

static void store_queries(const QfAttnBwdParams& params, const Sequence& s, int head, int64_t first, int count,
                          const QueryTile& tile) {
  const QfAttnParams& p = params.fwd;
  const int pitch = pitch_of(p);
  if (s.len_k == 0) return clear_rows(p, params.dq, s, s.first_q + first, count, head);
  for (int r = 0; r < count; r++) {
    float* dq = tile.dq + r * pitch;
    scale_row(dq, pitch, p.scale);
    rotate_row(dq, p.rope, query_position(p, s, first + r), true);
    store_row(row_address(params.dq, p.dtype, s.batch, s.first_q + first + r, head), dq, p.dtype, p.head_dim);
  }
}

static void store_keys(const QfAttnBwdParams& params, const Sequence& s, int kv_head, int64_t first, int count,
                       int rows, const KeyBlock& block) {
  const QfAttnParams& p = params.fwd;
  const int pitch = pitch_of(p);
  for (int j = 0; j < count; j++) {
    const int64_t row = s.first_k + first + j;
    float* dk = block.dk + j * pitch;
    scale_row(dk, pitch, p.scale);
    rotate_row(dk, p.rope, key_position(p, s, first + j), true);
    store_row(row_address(params.dk, p.dtype, s.batch, row, kv_head), dk, p.dtype, p.head_dim);
    store_row(row_address(params.dv, p.dtype, s.batch, row, kv_head), block.dv + j * pitch, p.dtype, p.head_dim);
  }
  clear_rows(p, params.dk, s, s.first_k + first + count, rows - count, kv_head);
  clear_rows(p, params.dv, s, s.first_k + first + count, rows - count, kv_head);
}

// A sink is a key without a value: its weight exp(sink - lse) and dP = 0 give dS = -weight * delta. A row that sees no
// key has its sink as lse and contributes nothing to out; with params.partial that lse indicates that it sees no key
// elsewhere.
static double sink_share(const QfAttnBwdParams& params, const Sequence& s, int head, int64_t first, int64_t count) {
  const QfAttnParams& p = params.fwd;
  const int pitch = pitch_of(p);
  const float sink = p.sinks[head];
  if (sink == -INFINITY) return 0.0;  // no sink
  const int64_t statistics = s.batch * p.lse_stride_b + head * p.lse_stride_h + s.first_q;
  alignas(64) float out[kMaxHeadDim], dout[kMaxHeadDim];
  double share = 0.0;
  for (int64_t row = first; row < first + count; row++) {
    const KeyRange keys = visible_keys(p, s, row);
    const float lse = p.lse[statistics + row];
    float delta = params.dlse ? -params.dlse[statistics + row] : 0.0f;
    if (keys.begin < keys.end || (params.partial && lse != sink)) {
      load_padded(out, row_address(p.out, p.dtype, s.batch, s.first_q + row, head), p.dtype, p.head_dim, pitch);
      load_padded(dout, row_address(params.dout, p.dtype, s.batch, s.first_q + row, head), p.dtype, p.head_dim, pitch);
      delta += dot_rows(dout, out, pitch);
    }
    share -= sink_weight(sink, lse) * delta;
  }
  return share;
}

extern const BackwardKernels backward_kernels = {kLanes,         load_queries,  load_keys,  probabilities, add_to_keys,
                                                 add_to_queries, store_queries, store_keys, sink_share};

}  // namespace QF_ISA
}  // namespace qf
