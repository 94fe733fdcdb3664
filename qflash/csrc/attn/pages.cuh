// A sequence's keys and values in the pages of a cache: which page holds a token, and which entries of the page table
// may be followed. A kernel for pages is compiled separately (kPaged); one for arrays contains none of this.
#pragma once

#include "attn/mask.cuh"
#include "attn/sequence.cuh"
#include "qflash.h"

namespace qf {

// Can these kernels read such pages? Host side. TMA boxes have at least 16 tokens, each box in one page.
inline bool pages_walk(const QfAttnParams& p) {
  return p.kv.page_size >= 16 && p.kv.page_size % 16 == 0 && p.kv.pages >= 0 && !p.cu_seqlens_k;
}

struct Place {
  int page, token;  // a page outside 0 .. pages - 1 must not be read
};

// One sequence's row of the table.
struct PageRow {
  const int32_t* g_entries;
  int page_size, pages;  // of a pool

  __device__ __forceinline__ PageRow(const QfKv& kv, int b)
      : g_entries(kv.page_table + b * kv.page_table_stride), page_size(kv.page_size), pages(kv.pages) {}
  __device__ __forceinline__ bool in_pool(int page) const { return unsigned(page) < unsigned(pages); }

  // Index of a token's entry. Page sizes are nearly always powers of two; a division takes twenty instructions.
  __device__ __forceinline__ int column(int token) const {
    const bool power = (page_size & (page_size - 1)) == 0;
    return power ? token >> (__ffs(page_size) - 1) : token / page_size;
  }
  __device__ __forceinline__ int in_page(int token) const { return token - column(token) * page_size; }
  // The page of a token, which the sequence has; -1: the entry is out of range and must not be followed.
  __device__ __forceinline__ int page_of(int token) const {
    const int page = g_entries[column(token)];
    return in_pool(page) ? page : -1;
  }
  // For a token that may have no entry in the table; `tokens`: those that have one.
  __device__ __forceinline__ Place place(int token, int tokens) const {
    const int entry = column(token);
    return {token < tokens ? g_entries[entry] : -1, token - entry * page_size};
  }
  // Collective for a warp: are the pages of all these tokens in the pool?
  __device__ __forceinline__ bool all_in_pool(const KeyRange& tokens) const {
    if (tokens.begin >= tokens.end) return true;
    const int last = column(tokens.end - 1);
    bool good = true;
    for (int i = column(tokens.begin) + int(threadIdx.x % 32); i <= last; i += 32) good = good && in_pool(g_entries[i]);
    return __all_sync(0xffffffffu, good);
  }
};

// Is an entry that some visible token needs out of range? This thread's share of the answer, of `threads`. Entries that
// no row of the sequence needs, before a window or after the last token, may be anything.
__device__ inline bool needs_missing_page(const QfAttnParams& p, const Sequence& s, int b, int thread, int threads) {
  if (!s.good || s.len_q <= 0) return false;
  const KeyRange keys = Mask{p.window_left, p.window_right, s.len_q, s.len_k}.seen_by_any(0, s.len_q - 1);
  if (keys.begin == keys.end) return false;
  const PageRow row(p.kv, b);
  const int end = row.column(keys.end - 1) + 1;
  bool missing = false;
#pragma unroll 4
  for (int i = row.column(keys.begin) + thread; i < end; i += threads) missing |= !row.in_pool(row.g_entries[i]);
  return missing;
}

// read_sequence() for K and V in pages. Collective: every thread of the block calls it with the same b.
__device__ inline Sequence read_paged_sequence(const QfAttnParams& p, int b) {
  Sequence s = sequence_of<true>(p, b, packed_rows_fall(p));
  if (__syncthreads_or(needs_missing_page(p, s, b, threadIdx.x, blockDim.x))) s.good = false;
  return s;
}

// One head of a sequence's K or V, the counterpart of HeadRows for pages.
template <class Element>
struct PagedRows {
  const Element* g_head;  // token 0 of page 0
  int64_t stride_page, stride_t;
  PageRow table;
  int length, head_dim;
  bool vector;  // load4's condition holds for every row

  __device__ __forceinline__ PagedRows(const QfTensor& x, const QfKv& kv, int b, int h, int len, int dim,
                                       bool vectorises)
      : g_head(static_cast<const Element*>(x.data) + h * x.stride_h),
        stride_page(x.stride_b),
        stride_t(x.stride_t),
        table(kv, b),
        length(len),
        head_dim(dim),
        vector(vectorises) {}

  __device__ __forceinline__ const Element* row(int page, int i) const {
    return g_head + page * stride_page + table.in_page(i) * stride_t;
  }
  // Row of a token that some row sees: its page is in range.
  __device__ __forceinline__ const Element* row(int i) const { return row(table.page_of(i), i); }
};

}  // namespace qf
