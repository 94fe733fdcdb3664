// The forward pass of one block of rows: tiled online softmax.
//
//   for each tile of keys     S = Q K^T           [rows, tile]; six rows skip panels of keys that none of them sees
//                             P = softmax(S)      m, l are updated
//                             O = alpha O + P V   in tiles with masks six rows at a time, over the keys they see
//
// Scratch per thread: Q and O of the block, S, and one tile of packed K and V unless they are packed already.
#include "forward.h"

#include "finish.h"
#include "hadamard.h"
#include "interrupt.h"
#include "pack.h"
#include "scratch.h"
#include "softmax.h"
#include "threads.h"

namespace qf {
namespace QF_ISA {
namespace {

struct Scratch {
  float *q, *o, *s, *k, *v, *row_buffer, *alpha, *dot_mean;
  RowState* states;
  int64_t rows, pitch;  // pitch of q and o rows: head_dim in whole vectors
};

// With base = NULL, only counts.
size_t lay_out(void* base, int64_t rows, int64_t head_dim, bool packed, Scratch* scratch) {
  FloatArena arena(base);
  const int64_t pitch = round_up(head_dim, kLanes);
  scratch->rows = rows;
  scratch->pitch = pitch;
  scratch->q = arena.take(rows * pitch);
  scratch->o = arena.take(rows * pitch);
  scratch->s = arena.take(rows * kTileKeys);
  scratch->k = arena.take(packed ? 0 : kTileKeys * head_dim);
  scratch->v = arena.take(packed ? 0 : kTileKeys * pitch);
  scratch->row_buffer = arena.take(kLanes * pitch);
  scratch->alpha = arena.take(rows + kRowSlots);  // the softmax writes whole vectors
  scratch->dot_mean = arena.take(rows);
  scratch->states = reinterpret_cast<RowState*>(arena.take(rows * 2));
  return arena.used();
}

// For rows that were already multiplied by their alpha. Blocks that read in place have at most kDirectRows.
struct OnesPerRow {
  float one[kDirectRows];
  constexpr OnesPerRow() : one() {
    for (float& x : one) x = 1.0f;
  }
};

// Tiles between checks for an interrupt: some milliseconds' work.
constexpr int64_t kTilesPerLook = 16;

class Block {
 public:
  Block(const QfAttnParams& p, const RowBlock& block, const Scratch& scratch)
      : p_(p),
        block_(block),
        s_(block.sequence),
        x_(scratch),
        dim_(p.head_dim),
        map_(score_map(p)),
        k_(key_rows(p, block.sequence, block.kv_head)),
        v_(value_rows(p, block.sequence, block.kv_head)) {
    keys_in_place_ = p.kv.k_dtype == QF_F32 && !rotates_keys(p);
    values_in_place_ = block.direct && p.kv.v_dtype == QF_F32 && dim_ % kLanes == 0;
  }

  int run() {
    load_queries();
    const KeyRange any = keys_of_any(p_, s_, block_.first_query, block_.first_query + block_.queries - 1);
    const int64_t begin = any.begin > block_.key_begin ? any.begin : block_.key_begin;
    const int64_t end = any.end < block_.key_end ? any.end : block_.key_end;
    for (int64_t start = begin / kTileKeys * kTileKeys; begin < end && start < end; start += kTileKeys) {
      if (start / kTileKeys % kTilesPerLook == kTilesPerLook - 1 && interrupted()) return QF_INTERRUPTED;
      first_key_ = start;
      keys_ = int(end - start < kTileKeys ? end - start : kTileKeys);
      tile();
    }
    if (block_.partial)
      store_partial();
    else
      store_result();
    return QF_OK;
  }

 private:
  int64_t query_of(int64_t row) const { return block_.first_query + row % block_.queries; }
  int64_t head_of(int64_t row) const { return block_.first_head + row / block_.queries; }

  void load_queries() {
    for (int64_t r = 0; r < x_.rows; r++) {
      float* q = x_.q + r * x_.pitch;
      load_row(q, row_address(p_.q, p_.dtype, s_.batch, s_.first_q + query_of(r), head_of(r)), p_.dtype, dim_);
      if (p_.rope.cos) rotate_row(q, p_.rope, query_position(p_, s_, query_of(r)));
      for (int64_t d = dim_; d < x_.pitch; d++) q[d] = 0.0f;
      if (p_.scale < 0.0f)
        for (int d = 0; d < dim_; d++) q[d] = -q[d];
      if (p_.kv.kind == QF_KV_PAGES_INT8) meet_int8_keys(r, q);
      x_.states[r] = {-kInfinity, 0.0f};
    }
    memset(x_.o, 0, size_t(x_.rows * x_.pitch) * sizeof(float));
  }

  // Keys have their mean subtracted and are multiplied by a Hadamard matrix. The query is multiplied by the matrix too,
  // which leaves every score unchanged, and its product with the mean is stored.
  void meet_int8_keys(int64_t row, float* q) {
    const float* mean = p_.kv.k_mean ? p_.kv.k_mean + block_.kv_head * dim_ : nullptr;
    x_.dot_mean[row] = mean ? dot_rows(q, mean, dim_) : 0.0f;
    multiply_by_hadamard(q, dim_);
  }
  bool keys_lack_mean() const { return p_.kv.kind == QF_KV_PAGES_INT8 && p_.kv.k_mean; }

  // The part of this tile that row `row` sees.
  Span span_of(int64_t row) const {
    const KeyRange range = visible_keys(p_, s_, query_of(row));
    const int64_t begin = range.begin - first_key_, end = range.end - first_key_;
    const Span span{begin < 0 ? 0 : begin > keys_ ? keys_ : int(begin), end > keys_ ? keys_ : end < 0 ? 0 : int(end)};
    return span.begin < span.end ? span : Span{0, 0};
  }

  // The keys that any of `count` rows sees; their own ranges go to spans.
  Span spans_of(int64_t row, int count, Span* spans) const {
    Span all{keys_, 0};
    for (int i = 0; i < count; i++) {
      spans[i] = whole_ ? Span{0, keys_} : span_of(row + i);
      if (spans[i].begin == spans[i].end) continue;
      if (spans[i].begin < all.begin) all.begin = spans[i].begin;
      if (spans[i].end > all.end) all.end = spans[i].end;
    }
    return all.begin < all.end ? all : Span{0, 0};
  }

  void tile() {
    const int64_t last = block_.first_query + block_.queries - 1;
    const KeyRange all = keys_of_all(p_, s_, block_.first_query, last);
    whole_ = all.begin <= first_key_ && first_key_ + keys_ <= all.end;
    const bool finite = load_tile();
    if (block_.direct)
      scores_in_place();
    else
      scores();
    for (int64_t row = 0; row < x_.rows; row += kMaxRows) weigh(row, finite);
    if (whole_) accumulate(0, x_.rows, {0, keys_});
  }

  // Weights of up to six rows from `row` on; in a tile with masks also their share of P V, over the keys they see.
  void weigh(int64_t row, bool finite) {
    const int count = int(x_.rows - row < kMaxRows ? x_.rows - row : kMaxRows);
    Span spans[kMaxRows];
    const Span any = spans_of(row, count, spans);
    if (any.begin == any.end) return;
    // A softcap needs complete scores. Without it the mean's share, the same for all keys, is added at the row's end.
    if (map_.cap != 0.0f && keys_lack_mean())
      for (int i = 0; i < count; i++)
        for (int j = any.begin; j < any.end; j++) x_.s[(row + i) * kTileKeys + j] += x_.dot_mean[row + i];
    online_softmax(x_.s + row * kTileKeys, kTileKeys, count, spans, map_, x_.states + row, x_.alpha + row);
    if (whole_) return;
    if (finite) {
      for (int i = 0; i < count; i++) clear_unseen(row + i, spans[i], any);
      return accumulate(row, count, any);
    }
    // 0 * NaN is NaN: a masked key's value must not be multiplied even by a zero weight.
    for (int i = 0; i < count; i++)
      if (spans[i].begin < spans[i].end) accumulate(row + i, 1, spans[i]);
  }

  // Prepares the tile for scores() and accumulate(); returns whether its values are known to be finite.
  bool load_tile() {
    if (block_.packed) {
      const int64_t floats = packed_tile_floats(dim_);
      const float* tile = block_.packed + first_key_ / kTileKeys * floats;
      const bool more = first_key_ + kTileKeys < s_.len_k;
      const char* next = reinterpret_cast<const char*>(tile + floats);
      ahead_ = {next, more ? next + floats * int64_t(sizeof(float)) : next};
      keys_tile_ = tile;
      values_tile_ = tile + kTileKeys * dim_;
      return tile[floats - 1] != 0.0f;
    }
    keys_tile_ = x_.k;
    values_tile_ = x_.v;
    if (!block_.direct) pack_keys(p_, s_, first_key_, keys_, block_.kv_head, x_.row_buffer, x_.k);
    return !values_in_place_ && pack_values(p_, s_, first_key_, keys_, block_.kv_head, kTileKeys, x_.row_buffer, x_.v);
  }

  // Prefetches `count` rows of k or v from the tile's row `first` on. They are full strides apart, often each on its
  // own page, where no hardware prefetcher follows.
  void prefetch_rows(const KvRows& rows, int first, int count) const {
    if (first + count > keys_) count = keys_ - first;
    rows.each(first_key_ + first, count, [&](int, const char* row, float) {
      for (int64_t byte = 0; byte < rows.row_bytes(); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    });
  }

  // S without a copy of K: each key is read once, for all rows.
  void scores_in_place() {
    for (int j = 0; j < keys_; j += kLanes) {
      const int count = keys_ - j < kLanes ? keys_ - j : kLanes;
      prefetch_rows(v_, j, count);
      prefetch_rows(k_, j + kLanes, kLanes);
      const float* keys[kLanes];
      k_.each(first_key_ + j, count, [&](int i, const char* row, float scale) {
        keys[i] = keys_in_place_ ? reinterpret_cast<const float*>(row)
                                 : key_row(p_, s_, first_key_ + j + i, k_, row, scale, x_.row_buffer + i * x_.pitch);
      });
      for (int i = count; i < kLanes; i++) keys[i] = keys[0];
      for (int64_t row = 0; row < x_.rows; row++)
        store(x_.s + row * kTileKeys + j, dot_products(x_.q + row * x_.pitch, keys));
    }
  }

  // q . keys[i] in lane i. Eight keys at a time: rows that are a power of two apart map to one set of the first-level
  // cache, which has room for eight lines, and eight addresses stay in registers.
  Vec dot_products(const float* q, const float* const* keys) const {
    constexpr int kKeys = kLanes < 8 ? kLanes : 8;
    Vec sums[kLanes];
#pragma GCC unroll 2
    for (int first = 0; first < kLanes; first += kKeys) add_products<kKeys>(q, keys + first, sums + first);
    return sum_rows(sums);
  }

  // sums[i] = q * keys[i], channels in order along the lanes.
  template <int kKeys>
  __attribute__((always_inline)) void add_products(const float* q, const float* const* keys, Vec* sums) const {
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; i++) sums[i] = zero();
    int d = 0;
    for (; d + kLanes <= dim_; d += kLanes) {
      const Vec x = load(q + d);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; i++) sums[i] = fma(x, load(keys[i] + d), sums[i]);
    }
    if (d < dim_) {
      const Vec x = load(q + d);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; i++) sums[i] = fma(x, load_part(keys[i] + d, dim_ - d), sums[i]);
    }
  }

  // S, panel by panel: the panel stays in the first-level cache while the rows stream by.
  void scores() {
    for (int start = 0; start < keys_; start += kPanel) {
      const int width = keys_ - start < kPanel ? keys_ - start : kPanel;
      const int vectors = (width + kLanes - 1) / kLanes;
      if (whole_) {
        score_panel(0, x_.rows, start, vectors);
        continue;
      }
      for (int64_t row = 0; row < x_.rows; row += kMaxRows) {
        const int count = int(x_.rows - row < kMaxRows ? x_.rows - row : kMaxRows);
        Span spans[kMaxRows];
        const Span any = spans_of(row, count, spans);
        if (any.begin < start + width && any.end > start) score_panel(row, count, start, vectors);
      }
    }
  }

  void score_panel(int64_t row, int64_t count, int start, int vectors) {
    multiply<false>(count, vectors, x_.q + row * x_.pitch, x_.pitch, keys_tile_ + int64_t(start) * dim_, kPanel,
                    x_.s + row * kTileKeys + start, kTileKeys, dim_, nullptr, ahead_);
  }

  // Zeros the weights of keys that a row's neighbours see and it does not.
  void clear_unseen(int64_t row, Span span, Span all_rows) {
    float* weights = x_.s + row * kTileKeys;
    if (span.begin == span.end) span = {all_rows.begin, all_rows.begin};
    for (int j = all_rows.begin; j < span.begin; j++) weights[j] = 0.0f;
    for (int j = span.end; j < all_rows.end; j++) weights[j] = 0.0f;
  }

  // O = alpha O + P V for `count` rows from `row` on, over the keys of `span`. V in place is read page by page; the
  // sums continue in the same order, so that pages do not change the bits.
  void accumulate(int64_t row, int64_t count, Span span) {
    static constexpr OnesPerRow kOnes;
    const float* alpha = x_.alpha + row;
    for (int first = span.begin, keys; first < span.end; first += keys, alpha = kOnes.one) {
      keys = values_in_place_ ? int(v_.run(first_key_ + first, span.end - first)) : span.end - first;
      const float* in_place =
          values_in_place_ ? reinterpret_cast<const float*>(v_.address(first_key_ + first)) : nullptr;
      for (int64_t start = 0; start < x_.pitch; start += kPanel) {
        const int64_t width = x_.pitch - start < kPanel ? x_.pitch - start : kPanel;
        const float* values = in_place ? in_place + start : values_tile_ + start * kTileKeys + first * width;
        multiply<true>(count, int(width / kLanes), x_.s + row * kTileKeys + first, kTileKeys, values,
                       in_place ? v_.stride() / int64_t(sizeof(float)) : width, x_.o + row * x_.pitch + start, x_.pitch,
                       keys, alpha, ahead_);
      }
    }
  }

  void store_partial() {
    for (int64_t r = 0; r < x_.rows; r++) {
      float* partial = block_.partial + r * (dim_ + 2);
      memcpy(partial, x_.o + r * x_.pitch, size_t(dim_) * sizeof(float));
      const RowState state = whole_scores(r);
      partial[dim_] = state.m;
      partial[dim_ + 1] = state.l;
    }
  }

  void store_result() {
    for (int64_t r = 0; r < x_.rows; r++)
      finish_row(p_, s_, head_of(r), query_of(r), x_.o + r * x_.pitch, whole_scores(r), map_);
  }

  // The state of a row as if the mean had not been subtracted from the keys.
  RowState whole_scores(int64_t row) const {
    RowState state = x_.states[row];
    if (map_.cap == 0.0f && keys_lack_mean()) state.m += x_.dot_mean[row];
    return state;
  }

  const QfAttnParams& p_;
  const RowBlock& block_;
  const Sequence& s_;
  const Scratch& x_;
  const int dim_;
  const ScoreMap map_;
  const KvRows k_, v_;
  bool keys_in_place_;     // rows of K need no conversion
  bool values_in_place_;   // V is read in place
  int64_t first_key_ = 0;  // of the current tile, and its keys
  int keys_ = 0;
  Ahead ahead_;                                                // the next packed tile
  const float *keys_tile_ = nullptr, *values_tile_ = nullptr;  // as pack_keys and pack_values write them
  bool whole_ = false;                                         // every row sees the whole tile
};

}  // namespace

int forward_block(const QfAttnParams& p, const RowBlock& block) {
  const int64_t rows = block.heads * block.queries;
  Scratch scratch;
  void* memory = thread_scratch(lay_out(nullptr, rows, p.head_dim, block.packed, &scratch));
  if (!memory) return QF_NO_MEMORY;
  lay_out(memory, rows, p.head_dim, block.packed, &scratch);
  return Block(p, block, scratch).run();
}

int pack_tile(const QfAttnParams& p, const Sequence& sequence, int64_t kv_head, int64_t first_key, float* tile) {
  const int64_t left = sequence.len_k - first_key, keys = left < kTileKeys ? left : kTileKeys;
  float* row_buffer =
      static_cast<float*>(thread_scratch(size_t(kLanes * round_up(p.head_dim, kLanes)) * sizeof(float)));
  if (!row_buffer) return QF_NO_MEMORY;
  pack_keys(p, sequence, first_key, keys, kv_head, row_buffer, tile);
  const bool finite =
      pack_values(p, sequence, first_key, keys, kv_head, kTileKeys, row_buffer, tile + kTileKeys * p.head_dim);
  tile[packed_tile_floats(p.head_dim) - 1] = finite;
  return QF_OK;
}

int merge_splits(const QfAttnParams& p, const RowBlock& block, int64_t splits) {
  const ScoreMap map = score_map(p);
  const int64_t rows = block.heads * block.queries, pitch = p.head_dim + 2, split_pitch = rows * pitch;
  float o[kMaxHeadDim];
  for (int64_t r = 0; r < rows; r++) {
    const float* first = block.partial + r * pitch;
    RowState state{-kInfinity, 0.0f};
    for (int64_t i = 0; i < splits; i++) {
      const float m = first[i * split_pitch + p.head_dim];
      if (m > state.m) state.m = m;
    }
    for (int d = 0; d < p.head_dim; d++) o[d] = 0.0f;
    for (int64_t i = 0; i < splits; i++) {
      const float* part = first + i * split_pitch;
      const float m = part[p.head_dim], l = part[p.head_dim + 1];
      const float weight = m == state.m ? 1.0f : m == -kInfinity ? 0.0f : exp2f((m - state.m) * map.factor);
      state.l += weight * l;
      for (int d = 0; d < p.head_dim; d++) o[d] += weight * part[d];
    }
    finish_row(p, block.sequence, block.first_head + r / block.queries, block.first_query + r % block.queries, o, state,
               map);
  }
  return QF_OK;
}
}  // namespace QF_ISA
}  // namespace qf
