// Steps 4 to 6 of int8.h: a block of rows is processed against its keys, block by block, and written.
#pragma once

#include <math.h>

#include "denominator.h"
#include "int8.h"
#include "int8_pack.h"
#include "int8_softmax.h"
#include "threads.h"

namespace qf {
namespace QF_ISA {

struct alignas(64) RowBlock {
  Row rows[kRowBlock];
  float totals[kRowBlock][kLanes];
  char scores[kRowBlock * kScoreStride];  // scores, then t, then weights
  Integer queries[kRowBlock * (kMaxHeadDim + kLanes)];
  float out[kRowBlock * kMaxHeadDim];
};

static inline int64_t query_of(const QfAttnParams& p, int64_t row) { return row / (p.q_heads / p.kv_heads); }
static inline int64_t q_head_of(const QfAttnParams& p, const Int8Head& head, int64_t row) {
  const int64_t group = p.q_heads / p.kv_heads;
  return head.kv_head * group + row % group;
}

static inline KeyRange intersection(KeyRange a, KeyRange b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

static void load_query(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t index, KeyRange share,
                       Row& row, Integer* integers) {
  alignas(64) float x[kRowFloats];
  const int64_t query = query_of(p, index);
  load_row(x, row_address(p.q, p.dtype, s.batch, s.first_q + query, q_head_of(p, head, index)), p.dtype, p.head_dim);
  clear(x, p.head_dim, int(round_up(p.head_dim, kLanes)));
  rotate_row(x, p.rope, query_position(p, s, query));
  if (p.scale < 0.0f)
    for (int i = 0; i < p.head_dim; i += kLanes) store(x + i, -load(x + i));
  const float q_scale = quantize_row(x, p.head_dim, integers);
  if (kBiased)
    for (int i = 0; i < depth_groups(p.head_dim) * kPack; i++) integers[i] = Integer(integers[i] + 128);
  const float scale = __builtin_fabsf(p.scale);
  row.cap_slope = q_scale * scale;
  row.slope = q_scale * (scale * kLog2e);
  row.bias = p.lse || p.sinks || p.softcap != 0.0f ? scale * dot_rows(x, head.mean, p.head_dim) : 0.0f;
  row.top = kLowestTop;
  row.seen = visible_keys(p, s, query);
  row.keys = intersection(row.seen, share);
}

// out += the contribution of the nonfinite values of the keys [seen): infinity, or NaN, or NaN from both signs of
// infinity.
static void add_nonfinite_values(const QfAttnParams& p, const Sequence& s, const Int8Head& head, KeyRange seen,
                                 float* out) {
  alignas(64) float v[kRowFloats];
  for (int64_t block = seen.begin / kInt8KeyBlock; block * kInt8KeyBlock < seen.end; block++) {
    if (!head.nonfinite[block]) continue;
    const KeyRange keys = intersection(seen, {block * kInt8KeyBlock, (block + 1) * kInt8KeyBlock});
    for (int64_t key = keys.begin; key < keys.end; key++) {
      load_row(v, row_address(p.kv.v, p.dtype, s.batch, s.first_k + key, head.kv_head), p.dtype, p.head_dim);
      for (int d = 0; d < p.head_dim; d++)
        if (!__builtin_isfinite(v[d])) out[d] += v[d];
    }
  }
}

static inline float largest_of(int32_t dtype) {
  return dtype == QF_F32 ? __FLT_MAX__ : dtype == QF_F16 ? 65504.0f : 3.38953138925153547590470800371487866880e+38f;
}

// Divides and writes one row. Finite values of v give a finite mean: rounding must not turn it into infinity. An
// overflowed sum is infinite, and stays so.
static void finish_row(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t index, const Row& row,
                       float total, float* out) {
  const int64_t query = query_of(p, index), q_head = q_head_of(p, head, index);
  char* destination = row_address(p.out, p.dtype, s.batch, s.first_q + query, q_head);
  float* lse = p.lse ? p.lse + s.batch * p.lse_stride_b + q_head * p.lse_stride_h + s.first_q + query : nullptr;
  if (row.seen.begin >= row.seen.end) {
    clear(out, 0, p.head_dim);
    if (lse) *lse = p.sinks ? p.sinks[q_head] : -__builtin_inff();
  } else {
    const double top = double(p.softcap != 0.0f ? 0.0f : row.bias) + double(kLn2) * row.top;
    const double sink = p.sinks ? double(p.sinks[q_head]) : -INFINITY;
    const Denominator all = denominator(top, total, sink);
    const Vec inverse = broadcast(1.0f / all.l);
    const Vec limit = broadcast(largest_of(p.dtype)), infinity = broadcast(__builtin_inff());
    for (int d = 0; d < p.head_dim; d += kLanes) {
      const Vec sum = load(out + d), mean = sum * inverse;
      store(out + d, select_less(vmax(sum, -sum), infinity, vmin(limit, vmax(-limit, mean)), mean));
    }
    add_nonfinite_values(p, s, head, row.seen, out);
    if (lse) *lse = float(all.lse);
  }
  store_row(destination, out, p.dtype, p.head_dim);
}

// The keys that every row sees, cut to whole key steps; {0, 0} when there are none.
static inline KeyRange seen_by_all(const RowBlock& block, int count) {
  const int64_t begin = round_up(block.rows[count - 1].keys.begin, kInt8KeyStep);
  const int64_t end = block.rows[0].keys.end / kInt8KeyStep * kInt8KeyStep;
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

// All of a row block except the division: out, top and totals over the keys of `share`.
static void accumulate(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first_row, int count,
                       KeyRange share, RowBlock& block) {
  const int stride = integer_stride(p.head_dim), width = value_width(p.head_dim);
  memset(block.queries, 0, size_t(kRowBlock) * stride * sizeof(Integer));
  memset(block.totals, 0, sizeof block.totals);
  memset(block.out, 0, size_t(kRowBlock) * width * 4);
  for (int r = 0; r < count; r++)
    load_query(p, s, head, first_row + r, share, block.rows[r], block.queries + r * stride);

  const Softcap softcap{p.softcap, p.softcap != 0.0f ? 1.0f / p.softcap : 0.0f};
  const int64_t panel_stride = panel_bytes(p.head_dim), end = block.rows[count - 1].keys.end;
  const KeyRange unmasked = seen_by_all(block, count);
  const TileSession tiles;
  int keys;
  for (int64_t key = block.rows[0].keys.begin / kInt8KeyStep * kInt8KeyStep; key < end; key += keys) {
    // A step does not cross the boundaries of the keys that all rows see, so that few steps need masks.
    const int64_t border = key < unmasked.begin ? unmasked.begin : key < unmasked.end ? unmasked.end : end;
    keys = int(border - key < kStepKeys ? round_up(border - key, kInt8KeyStep) : kStepKeys);
    score_block(tiles, block.queries, stride, count, head.keys + key / kInt8Panel * panel_stride, panel_stride,
                depth_groups(p.head_dim), keys, block.scores);
    for (int r = 0; r < count; r++) {
      Row& row = block.rows[r];
      char* scores = block.scores + r * kScoreStride;
      float* out = block.out + r * width;
      if (row.keys.begin <= key && row.keys.end >= key + keys)
        softmax_row<false>(scores, head.key_scales + key, keys, 0, 0, softcap, row, out, width, block.totals[r]);
      else
        softmax_row<true>(scores, head.key_scales + key, keys, float(row.keys.begin - key), float(row.keys.end - key),
                          softcap, row, out, width, block.totals[r]);
    }
    value_block(tiles, block.scores, count, head.values + key * value_bytes(p.head_dim), p.head_dim, keys, block.out);
  }
}

static int attend(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first_row, int count,
                  KeyRange share, const Int8Partial* partial) {
  RowBlock* block = static_cast<RowBlock*>(thread_scratch(sizeof(RowBlock)));
  if (!block) return QF_NO_MEMORY;
  accumulate(p, s, head, first_row, count, share, *block);
  const int width = value_width(p.head_dim);
  for (int r = 0; r < count; r++) {
    const float total = sum(load(block->totals[r]));
    if (partial) {
      partial->top[r] = block->rows[r].top;
      partial->total[r] = total;
      memcpy(partial->out + r * width, block->out + r * width, size_t(width) * 4);
    } else {
      finish_row(p, s, head, first_row + r, block->rows[r], total, block->out + r * width);
    }
  }
  return QF_OK;
}

static int merge(const QfAttnParams& p, const Sequence& s, const Int8Head& head, int64_t first_row, int count,
                 const Int8Partial* partials, int64_t shares) {
  alignas(64) float out[kRowFloats];
  alignas(64) Integer unused[kMaxHeadDim + kLanes];
  const int width = value_width(p.head_dim);
  for (int r = 0; r < count; r++) {
    Row row;
    load_query(p, s, head, first_row + r, {0, s.len_k}, row, unused);  // for its bias and its range
    for (int64_t i = 0; i < shares; i++) row.top = partials[i].top[r] > row.top ? partials[i].top[r] : row.top;
    clear(out, 0, kRowFloats);
    float total = 0.0f;
    for (int64_t i = 0; i < shares; i++) {
      const float factor = power_between(partials[i].top[r], row.top);
      total += factor * partials[i].total[r];
      for (int d = 0; d < width; d += kLanes)
        store(out + d, fma(broadcast(factor), load(partials[i].out + r * width + d), load(out + d)));
    }
    finish_row(p, s, head, first_row + r, row, total, out);
  }
  return QF_OK;
}

}  // namespace QF_ISA
}  // namespace qf
