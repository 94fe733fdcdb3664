// One sequence of the batch: where its rows start and how long it is, read from device memory and checked there.
//
// A kernel must not synchronise to report a bad value, and must not touch memory a bad value points to. So a sequence
// whose description is out of range gets NaN in every row it owns, in out and in lse:
//   kv_lens[b] outside 0 .. len_k; a length above the max_seqlen the caller gave; an end past the total: that sequence.
//   an entry of the page table that is out of range and needed (pages.cuh): that sequence.
//   cu_seqlens_q decreasing anywhere: all rows, because it is undefined which sequence a row belongs to.
//   rows of q before cu_seqlens_q[0] or from cu_seqlens_q[batch] on: those rows.
#pragma once

#include "common/elements.cuh"
#include "qflash.h"

namespace qf {

struct Sequence {
  int64_t q0, k0;    // first row in q/out and in k/v; 0 unless packed
  int len_q, len_k;  // len_k: after kv_lens
  bool good;         // false: fill rows q0 .. q0 + owned - 1 with NaN and return
  int64_t owned;     // rows of q that belong to it
};

// Does cu_seqlens_q decrease somewhere? Collective: every thread of the block calls it.
__device__ inline bool packed_rows_fall(const QfAttnParams& p) {
  if (!p.cu_seqlens_q) return false;
  bool falls = p.batch == 0;
  for (int i = threadIdx.x; i < p.batch; i += blockDim.x) falls |= p.cu_seqlens_q[i + 1] < p.cu_seqlens_q[i];
  if (threadIdx.x == 0) falls |= p.cu_seqlens_q[0] < 0;
  return __syncthreads_or(falls);
}

// rows_fall: packed_rows_fall(p). kPaged: K and V are pages, whose table is not read here (pages.cuh); q may be packed
// without them.
template <bool kPaged = false>
__device__ inline Sequence sequence_of(const QfAttnParams& p, int b, bool rows_fall) {
  Sequence s = {0, 0, p.q_len, p.k_len, true, p.q_len};
  if (p.cu_seqlens_q) {
    if (rows_fall) return {0, 0, 0, 0, false, b == 0 ? p.total_q : 0};
    const int64_t q0 = p.cu_seqlens_q[b], q1 = p.cu_seqlens_q[b + 1];
    const int64_t k0 = kPaged ? 0 : p.cu_seqlens_k[b], k1 = kPaged ? p.k_len : p.cu_seqlens_k[b + 1];
    const int64_t end = q1 < p.total_q ? q1 : p.total_q;
    s.good = q1 <= p.total_q && q1 - q0 <= p.q_len && k0 >= 0 && k0 <= k1 && (kPaged || k1 <= p.total_k) &&
             k1 - k0 <= p.k_len;
    s.q0 = q0 < end ? q0 : end;
    s.owned = end - s.q0;
    s.k0 = k0;
    s.len_q = int(s.owned);
    s.len_k = s.good ? int(k1 - k0) : 0;
  }
  if (p.kv_lens) {
    const int len = p.kv_lens[b];
    s.good = s.good && len >= 0 && len <= s.len_k;
    s.len_k = len;
  }
  return s;
}

// Collective: every thread of the block calls it with the same b.
__device__ inline Sequence read_sequence(const QfAttnParams& p, int b) {
  return sequence_of(p, b, packed_rows_fall(p));
}

// The same for kernels without packed arrays: only kv_lens can be out of range.
__device__ inline Sequence read_padded_sequence(const QfAttnParams& p, int b) {
  const int len_k = p.kv_lens ? p.kv_lens[b] : p.k_len;
  return {0, 0, p.q_len, len_k, len_k >= 0 && len_k <= p.k_len, p.q_len};
}

// The threads that fill rows together: here, the whole block.
struct WholeBlock {
  __device__ static __forceinline__ int thread() { return int(threadIdx.x); }
  __device__ static __forceinline__ int threads() { return int(blockDim.x); }
};

// Writes NaN to rows begin .. end-1 of head h, this block's share of them (block `tile` of `tiles`): channels
// [d_begin, d_end) of out and, if requested, lse.
template <class Element, class By>
__device__ inline void fill_nan(const QfAttnParams& p, int b, int h, int64_t begin, int64_t end, int tile, int tiles,
                                int d_begin, int d_end, bool lse) {
  Element x;
  from_float(nan(), x);
  for (int64_t row = begin + int64_t(tile) * By::threads() + By::thread(); row < end;
       row += int64_t(tiles) * By::threads()) {
    Element* g_row = static_cast<Element*>(p.out.data) + b * p.out.stride_b + row * p.out.stride_t + h * p.out.stride_h;
    for (int d = d_begin; d < d_end; ++d) g_row[d] = x;
    if (lse && p.lse) p.lse[b * p.lse_stride_b + h * p.lse_stride_h + row] = nan();
  }
}

// Fills the rows of head h that no good sequence fills: those of a bad one, and packed rows outside every sequence.
template <class Element, class By = WholeBlock>
__device__ inline void fill_unserved_rows(const QfAttnParams& p, const Sequence& s, int b, int h, int tile, int tiles,
                                          int d_begin, int d_end, bool lse) {
  if (!s.good) fill_nan<Element, By>(p, b, h, s.q0, s.q0 + s.owned, tile, tiles, d_begin, d_end, lse);
  if (!p.cu_seqlens_q) return;
  if (b == 0) {
    const int64_t first = p.cu_seqlens_q[0];
    fill_nan<Element, By>(p, b, h, 0, first < p.total_q ? first : p.total_q, tile, tiles, d_begin, d_end, lse);
  }
  if (b == p.batch - 1) {
    const int64_t last = p.cu_seqlens_q[p.batch];
    fill_nan<Element, By>(p, b, h, last > 0 ? last : 0, p.total_q, tile, tiles, d_begin, d_end, lse);
  }
}

}  // namespace qf
