// What a block's main loop needs once or twice per tile: its sequence, its mask, which keys its rows see. It is in
// shared memory, because the registers are full of scores and outputs.
#pragma once

#include "attn/mask.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "ptx/tid.cuh"

namespace qf {

// The rounding of a row's weights to 16 bits averages out over many keys, and does not over few.
constexpr int kFewKeys = 128;

template <int kWarps, int kWarpRows>
struct BlockState {
  Sequence seq;
  Mask mask;
  int b, h;                                       // of the batch, of q's heads
  float factor;                                   // of scores, in the exponential
  bool spoiled;                                   // V of some tile was cleared of NaN and infinity
  const void *k, *v;                              // row 0, channel 0 of the sequence's K and V in its head
  int block_row;                                  // first row of the block
  KeyRange block_keys, block_full;                // keys seen by some row of the block, by every row
  KeyRange warp_keys[kWarps], warp_full[kWarps];  // the same for each warp
  bool warp_sees_few[kWarps];                     // a row of the warp sees fewer than kFewKeys

  // Collective. The caller's next barrier makes it visible. k_head, v_head: row 0 of the sequence's K and V.
  __device__ __forceinline__ void fill(const QfAttnParams& p, const Work& work, const Sequence& sequence,
                                       const void* k_head, const void* v_head) {
    const Mask m = {p.window_left, p.window_right, sequence.len_q, sequence.len_k};
    const int thread = threadIdx.x, first_row = work.row_tile * (kWarps * kWarpRows);
    const auto last = [&](int first, int rows) { return min(first + rows, sequence.len_q) - 1; };
    if (thread < kWarps) {
      const int row = first_row + thread * kWarpRows;
      const bool exist = row < sequence.len_q;
      warp_keys[thread] = exist ? m.seen_by_any(row, last(row, kWarpRows)) : KeyRange{0, 0};
      // The number of keys a row sees is concave in the row, so it is least in the first or in the last.
      const auto count = [&](int i) { return exist ? m.visible(i).end - m.visible(i).begin : kFewKeys; };
      warp_sees_few[thread] = min(count(row), count(last(row, kWarpRows))) < kFewKeys;
      warp_full[thread] = exist ? m.seen_by_all(row, last(row, kWarpRows)) : KeyRange{0, 0};
    }
    if (thread == 0) {
      seq = sequence;
      mask = m;
      b = work.b;
      h = work.h;
      factor = score_factor(p.scale, p.softcap);
      spoiled = false;
      block_row = first_row;
      k = k_head;
      v = v_head;
      block_keys = m.seen_by_any(first_row, last(first_row, kWarps * kWarpRows));
      block_full = m.seen_by_all(first_row, last(first_row, kWarps * kWarpRows));
    }
  }

  // The block's work tile, for kernels without packed arrays. Collective; its barrier makes the state visible. False:
  // there is none, because kv_lens is out of range; the block's rows are then NaN.
  template <class Element>
  __device__ __forceinline__ bool begin(const QfAttnParams& p, const Grid& grid) {
    const Work work(p, grid);
    const Sequence sequence = read_padded_sequence(p, work.b);
    if (!sequence.good) {
      fill_nan<Element, WholeBlock>(p, work.b, work.h, 0, p.q_len, work.row_tile, grid.row_tiles, 0, p.head_dim, true);
      return false;
    }
    const auto head = [&](const QfTensor& x) {
      return static_cast<const Element*>(x.data) + work.b * x.stride_b + work.h / (p.q_heads / p.kv_heads) * x.stride_h;
    };
    fill(p, work, sequence, head(p.kv.k), head(p.kv.v));
    __syncthreads();
    return true;
  }

  // Does every row of the block see all the keys key0 .. key0 + keys - 1?
  __device__ __forceinline__ bool whole_for_block(int key0, int keys) const {
    return key0 >= block_full.begin && key0 + keys <= block_full.end;
  }
  // Does no row of this warp see them; does every row see all of them?
  __device__ __forceinline__ bool idle(int key0, int keys) const {
    const KeyRange seen = warp_keys[fresh_tid() / 32];
    return key0 >= seen.end || key0 + keys <= seen.begin;
  }
  __device__ __forceinline__ bool whole_for_warp(int key0, int keys) const {
    const KeyRange full = warp_full[fresh_tid() / 32];
    return key0 >= full.begin && key0 + keys <= full.end;
  }

  __device__ __forceinline__ bool sees_few() const { return warp_sees_few[fresh_tid() / 32]; }

  // This lane's first row (the others follow 8 apart), and its first column in every 8 keys or channels.
  __device__ __forceinline__ int row0() const {
    const int thread = fresh_tid();
    return block_row + thread / 32 * kWarpRows + thread % 32 / 4;
  }
  __device__ static __forceinline__ int column() { return fresh_tid() % 4 * 2; }
};

}  // namespace qf
