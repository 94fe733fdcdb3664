// What a block of a backward kernel needs once per tile, in shared memory because registers are scarcer. Stationary
// rows are queries or keys, and streamed columns the other; a mask for keys is that of queries with its sides
// exchanged.
#pragma once

#include "attn/mask.cuh"
#include "attn/sequence.cuh"
#include "ptx/tid.cuh"

namespace qf {

__device__ __forceinline__ Mask mask_of_queries(const QfAttnParams& p, const Sequence& seq) {
  return {p.window_left, p.window_right, seq.len_q, seq.len_k};
}
// Query i sees key j where j - i - (len_k - len_q) lies in -left .. right. So key j is seen by the queries for which
// i - j - (len_q - len_k) lies in -right .. left.
__device__ __forceinline__ Mask mask_of_keys(const QfAttnParams& p, const Sequence& seq) {
  return {p.window_right, p.window_left, seq.len_k, seq.len_q};
}

// kShare neighbouring warps share kWarpRows rows.
template <int kWarps, int kWarpRows, int kShare = 1>
struct StationaryState {
  static constexpr int kParts = kWarps / kShare;  // of the block's rows

  Sequence seq;
  Mask mask;                                    // of the stationary rows
  int b, h;                                     // h: of the stationary rows' heads
  int first_row;                                // of the block
  KeyRange any, all;                            // columns that some row of the block sees, that every row sees
  KeyRange part_any[kParts], part_all[kParts];  // the same for each warp's rows

  // Collective. The caller's next barrier makes it visible.
  __device__ __forceinline__ void fill(const Sequence& sequence, const Mask& m, int batch, int head, int first) {
    const int thread = threadIdx.x, length = m.len_q;
    const auto of = [&](int row, int rows, KeyRange& some, KeyRange& every) {
      const int last = min(row + rows, length) - 1;
      some = every = {0, 0};
      if (row >= length) return;
      some = m.seen_by_any(row, last);
      if (row + rows <= length) every = m.seen_by_all(row, last);  // rows that do not exist see nothing
    };
    if (thread < kParts) of(first + thread * kWarpRows, kWarpRows, part_any[thread], part_all[thread]);
    if (thread == 0) {
      seq = sequence;
      mask = m;
      b = batch;
      h = head;
      first_row = first;
      of(first, kParts * kWarpRows, any, all);
    }
  }

  // Does every row of the block see all `count` columns from `first` on? For this warp's rows: the same, and does no
  // row see any?
  __device__ __forceinline__ bool whole_for_block(int first, int count) const {
    return first >= all.begin && first + count <= all.end;
  }
  __device__ __forceinline__ bool whole_for_warp(int first, int count) const {
    const KeyRange every = part_all[part()];
    return first >= every.begin && first + count <= every.end;
  }
  __device__ __forceinline__ bool idle(int first, int count) const {
    const KeyRange some = part_any[part()];
    return first >= some.end || first + count <= some.begin;
  }

  // This lane's first row in tensor-core fragments (the others follow 8 apart), and its first column of every 8.
  __device__ __forceinline__ int row0() const {
    return first_row + part() * kWarpRows + int(uint32_t(fresh_tid()) % 32 / 4);
  }
  __device__ static __forceinline__ int part() { return int(uint32_t(fresh_tid()) / (32 * kShare)); }
  __device__ static __forceinline__ int column() { return int(uint32_t(fresh_tid()) % 4 * 2); }
};

}  // namespace qf
