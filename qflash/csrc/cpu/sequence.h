// The shape of one sequence of the batch and the keys its queries see. Shared by every kernel of the engine.
//
// Visible keys of a row are always one range, and both its ends never decrease as the row index grows; everything about
// masks, from skipping tiles to the last lane, follows from these ranges.
#pragma once

#include <stdint.h>

#include "qflash.h"

namespace qf {

struct Sequence {
  int64_t batch;
  int64_t first_q, first_k;  // first row in the (packed) tensors
  int64_t len_q, len_k;      // len_k: keys that exist, kv_lens applied
};

static inline Sequence sequence_of(const QfAttnParams& p, int64_t batch) {
  Sequence s{batch, 0, 0, p.q_len, p.k_len};
  if (p.cu_seqlens_q) {
    s.first_q = p.cu_seqlens_q[batch];
    s.len_q = p.cu_seqlens_q[batch + 1] - s.first_q;
  }
  if (p.cu_seqlens_k) {
    s.first_k = p.cu_seqlens_k[batch];
    s.len_k = p.cu_seqlens_k[batch + 1] - s.first_k;
  }
  if (p.kv_lens) s.len_k = p.kv_lens[batch];
  return s;
}

// Keys [begin, end); empty when begin >= end.
struct KeyRange {
  int64_t begin, end;
};

static inline KeyRange visible_keys(const QfAttnParams& p, const Sequence& s, int64_t query) {
  const int64_t diagonal = query + s.len_k - s.len_q;
  KeyRange range{0, s.len_k};
  if (p.window_left >= 0 && diagonal - p.window_left > 0) range.begin = diagonal - p.window_left;
  if (p.window_right >= 0 && diagonal + p.window_right + 1 < s.len_k) range.end = diagonal + p.window_right + 1;
  if (range.end < 0) range.end = 0;
  if (range.begin > s.len_k) range.begin = s.len_k;
  return range;
}

// Keys that at least one of the queries [first, last] sees: what is outside need not be touched. May hold keys that
// no query sees when the queries see nothing at all.
static inline KeyRange keys_of_any(const QfAttnParams& p, const Sequence& s, int64_t first, int64_t last) {
  return {visible_keys(p, s, first).begin, visible_keys(p, s, last).end};
}

// Keys that at least one query of the sequence sees. In pages, no others are read.
static inline KeyRange needed_keys(const QfAttnParams& p, const Sequence& s) {
  return s.len_q > 0 ? keys_of_any(p, s, 0, s.len_q - 1) : KeyRange{0, 0};
}

// Keys that every one of the queries [first, last] sees: what is inside needs no mask.
static inline KeyRange keys_of_all(const QfAttnParams& p, const Sequence& s, int64_t first, int64_t last) {
  return {visible_keys(p, s, last).begin, visible_keys(p, s, first).end};
}

// The queries [begin, end) that see at least one of the keys [first, last]: the same ranges, transposed.
static inline KeyRange queries_of_keys(const QfAttnParams& p, const Sequence& s, int64_t first, int64_t last) {
  const int64_t offset = s.len_k - s.len_q;
  KeyRange range{0, s.len_q};
  // Query i sees key j when i >= j - offset - right and i <= j - offset + left.
  if (p.window_right >= 0 && first - offset - p.window_right > 0) range.begin = first - offset - p.window_right;
  if (p.window_left >= 0 && last - offset + p.window_left + 1 < s.len_q) range.end = last - offset + p.window_left + 1;
  if (range.end < 0) range.end = 0;
  if (range.begin > s.len_q) range.begin = s.len_q;
  return range;
}

static inline int64_t query_position(const QfAttnParams& p, const Sequence& s, int64_t query) {
  if (p.rope.positions_q) return p.rope.positions_q[s.batch * p.rope.stride_positions_q_b + s.first_q + query];
  return query + s.len_k - s.len_q;
}

static inline int64_t key_position(const QfAttnParams& p, const Sequence& s, int64_t key) {
  if (p.rope.positions_k) return p.rope.positions_k[s.batch * p.rope.stride_positions_k_b + s.first_k + key];
  return key;
}

// Keys in pages were rotated when they were written.
static inline bool rotates_keys(const QfAttnParams& p) { return p.rope.cos && p.kv.page_size == 0; }

// Offset, in elements, of row `row` (counted from the tensor's start when packed) and head `head`.
static inline int64_t offset_of(const QfTensor& t, int64_t batch, int64_t row, int64_t head) {
  return batch * t.stride_b + row * t.stride_t + head * t.stride_h;
}

}  // namespace qf
