// What a persistent block does: a list of items, each one row tile of one head of one sequence.
//
// Where all items are equally long, a head's row tiles follow each other and blocks take them in turn: neighbours read
// the same K and V at the same time. Where masks or packed sequences make some longer than others, heads are taken in
// sections whose K and V fit the L2 cache together, the longest row tiles of a section first (causal masks make the
// last ones longest), and blocks draw their next one when they are about to need it. Which block takes which item is
// then left to chance; what becomes of it is not. kv_lens alone count as equally long: the workspace, where the counter
// is, is planned without their address.
//
// The kernel's own config.h comes before this header and all others here: it says how large tiles are.
#pragma once

#include "attn/mask.cuh"
#include "attn/sequence.cuh"

namespace qf {
namespace sm90 {

struct Items {
  int count, row_tiles, heads, section;  // heads: of all sequences; section: how many of them
  bool drawn;                            // not equally long: blocks draw one when they want one
  int* next;                             // where they draw
};

constexpr int kTooMany = 0x40000000;  // items: blocks count on from theirs

// Host side. As many as kTooMany cannot be served.
inline Items items_of(const QfAttnParams& p) {
  constexpr int64_t kCacheBytes = 16 << 20;  // of an L2 cache of 50 MB
  Items items{};
  items.row_tiles = (p.q_len + kBlockM - 1) / kBlockM;
  int batch = p.batch;
  if (p.cu_seqlens_q && p.total_q > 0) {  // packed rows that fit no sequence still get their NaN
    if (items.row_tiles == 0) items.row_tiles = 1;
    if (batch == 0) batch = 1;
  }
  const int64_t heads = int64_t(batch) * p.q_heads;
  items.heads = heads < kTooMany ? int(heads) : kTooMany;
  const int64_t group = p.kv_heads ? p.q_heads / p.kv_heads : 1;
  const int64_t head_bytes = 2 * int64_t(p.k_len) * p.head_dim * 2;
  items.drawn = p.window_left >= 0 || p.window_right >= 0 || p.cu_seqlens_q || p.total_q > 0;
  const int64_t fit = !items.drawn ? group : head_bytes > 0 ? kCacheBytes / head_bytes * group : items.heads;
  items.section = int(fit < group ? group : fit > items.heads ? items.heads : fit);
  if (items.section < 1) items.section = 1;
  const int64_t count = int64_t(items.row_tiles) * items.heads;
  items.count = count < kTooMany ? int(count) : kTooMany;
  return items;
}

struct Item {
  int b, h, row_tile;

  __device__ __forceinline__ Item(const QfAttnParams& p, const Items& items, int index) {
    const int per_section = items.section * items.row_tiles;
    const int s = index / per_section, rest = index - s * per_section;
    const int first = s * items.section, heads = min(items.section, items.heads - first);
    const int row = rest / heads, head = first + rest - row * heads;
    row_tile = items.row_tiles - 1 - row;
    b = head / p.q_heads;
    h = head - b * p.q_heads;
  }
};

// For every item of this block, in order: f(item). wanted(): returns once the next is to be drawn.
template <class Wanted, class F>
__device__ __forceinline__ void for_each_item(const QfAttnParams& p, const Items& items, Wanted wanted, F f) {
  for (int index = blockIdx.x; index < items.count;) {
    f(Item(p, items, index));
    if (items.drawn) {
      wanted();
      index = int(gridDim.x) + atomicAdd(items.next, 1);
    } else {
      index += int(gridDim.x);
    }
  }
}

// What everybody needs to know of an item. It takes a few thousand cycles to work out, so a thread of its own does,
// ahead of time, and leaves it in shared memory: consumers have no registers to spare either.
struct Record {
  Sequence seq;
  Mask mask;
  KeyRange keys, full;  // keys some row of the block sees, keys every row sees
  KeyRange window;      // of row0, wherever the sequence ends; a row further on it is a key further on
  int b, h, kv_head, row_tile, row0;
  int rows;                   // of the sequence, from row0 on
  int tiles;                  // of keys; -1: there are no more items
  bool unserved;              // there are rows that no good sequence fills
  int own_tiles[kConsumers];  // the first of them, after which a consumer sees no more
  int spoiled;                // V of some tile was cleared of NaN and infinity
  int64_t out_at, lse_at;     // of the first row, in elements
  KernelFacts facts;          // what its Math wants to know; where there are tiles

  // rows_outside: some rows belong to no sequence.
  __device__ __forceinline__ void fill(const QfAttnParams& p, const Item& item, bool rows_fall, bool rows_outside) {
    seq = sequence_of(p, item.b, rows_fall);
    mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
    b = item.b, h = item.h, kv_head = h / (p.q_heads / p.kv_heads), row_tile = item.row_tile;
    row0 = row_tile * kBlockM;
    rows = seq.len_q - row0;
    unserved = !seq.good || (rows_outside && (b == 0 || b == p.batch - 1));
  }
  // What follows from that.
  __device__ __forceinline__ void complete(const QfAttnParams& p) {
    const int first = row0, last = min(first + kBlockM, mask.len_q) - 1;
    keys = full = {0, 0};
    if (exists()) {
      keys = mask.seen_by_any(first, last);
      full = mask.seen_by_all(first, last);
    }
    keys.begin = keys.begin / kKeysFrom * kKeysFrom;
    tiles = (keys.end - keys.begin + kBlockN - 1) / kBlockN;
#pragma unroll 1
    for (int c = 0; c < kConsumers; ++c) {  // a consumer without rows takes a tile for nobody
      const int own = first + c * kGroupRows, own_last = min(own + kGroupRows, mask.len_q) - 1;
      const int end = tiles > 0 && own <= own_last ? mask.seen_by_any(own, own_last).end : 0;
      own_tiles[c] = kSkipsTiles ? max(1, (end - keys.begin + kBlockN - 1) / kBlockN) : tiles;
    }
    window = mask.window_at(first, kBlockM);
    spoiled = 0;
    out_at = b * p.out.stride_b + h * p.out.stride_h + (seq.q0 + first) * p.out.stride_t;
    lse_at = b * p.lse_stride_b + h * p.lse_stride_h + seq.q0 + first;
  }
  __device__ __forceinline__ bool exists() const { return seq.good && rows > 0; }
  // Does every row of the block see every one of the keys key0 .. key0 + kBlockN - 1?
  __device__ __forceinline__ bool whole(int key0) const { return key0 >= full.begin && key0 + kBlockN <= full.end; }
};

}  // namespace sm90
}  // namespace qf
