// Where a new token goes: its sequence, its position in it, and the slot of the page from the table.
#pragma once

#include "kernels/kv_write/kv_write/deal.h"

namespace qf {
namespace kv_write {

// The sequence that packed row `row` belongs to, if any; 0 .. batch - 1 in any case. Collective: every lane of a warp
// calls it with the same row. Each round reads 32 offsets, so 1024 sequences take two rounds.
__device__ __forceinline__ int search_sequence(const int32_t* g_cu_seqlens, int batch, int64_t row) {
  const int lane = threadIdx.x % 32;
  int first = 0, count = batch;  // it is among these
  while (count > 1) {
    const int step = (count + 31) / 32;
    const bool has_part = lane * step < count;
    const uint32_t begun = __ballot_sync(0xffffffffu, has_part && g_cu_seqlens[first + lane * step] <= row);
    const int part = max(__popc(begun) - 1, 0);  // below count / step, whatever the offsets are
    first += part * step;
    count = min(step, count - part * step);
  }
  return first;
}

// A row of k and v and the sequence it belongs to. b < 0: none.
struct Token {
  int b;
  int index, count;  // which of its sequence's new tokens, of how many
};

// `row`: of this thread. `first_row`: the lowest of its warp. Collective: every lane of a warp calls it.
__device__ __forceinline__ Token token_of(const QfKvWriteParams& p, const Deal& deal, int64_t row, int64_t first_row) {
  if (!p.cu_seqlens_k) {
    const int b = int(deal.length(uint32_t(row)));
    return {b, int(row - int64_t(b) * p.k_len), p.k_len};
  }
  int b = search_sequence(p.cu_seqlens_k, p.batch, first_row);
  while (b + 1 < p.batch && p.cu_seqlens_k[b + 1] <= row) ++b;
  const int64_t begin = p.cu_seqlens_k[b], end = p.cu_seqlens_k[b + 1];
  if (begin < 0 || row < begin || row >= end || end > p.total_k) return {-1, 0, 0};
  return {b, int(row - begin), int(end - begin)};
}

// page < 0: there is no such place, and the token is not written.
struct Place {
  int64_t position;  // in its sequence
  int page, slot;
};

__device__ __forceinline__ Place place_of(const QfKvWriteParams& p, const Deal& deal, const Token& token) {
  if (token.b < 0) return {0, -1, 0};
  const int64_t position = int64_t(p.kv_lens[token.b]) - token.count + token.index;
  const int column = position < 0 ? p.columns : int(deal.page_size(uint32_t(position)));
  if (column >= p.columns) return {position, -1, 0};
  const int page = p.kv.page_table[token.b * p.kv.page_table_stride + column];
  const int slot = int(position) - column * p.kv.page_size;
  return {position, page < p.kv.pages ? page : -1, slot};
}

// The token's position for rope. positions_k is indexed by k's rows when packed, else by sequence and token.
__device__ __forceinline__ int64_t rope_position(const QfKvWriteParams& p, const Token& token, const Place& place,
                                                 int64_t row) {
  if (!p.rope.positions_k) return place.position;
  if (p.cu_seqlens_k) return p.rope.positions_k[row];
  return p.rope.positions_k[token.b * p.rope.stride_positions_k_b + token.index];
}

}  // namespace kv_write
}  // namespace qf
