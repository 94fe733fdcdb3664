// A work tile: kBlockM query rows of one head of one sequence, against all keys that these rows see. One thread
// describes it for the whole block, ahead of time and in shared memory: that takes a few thousand cycles, and consumers
// have no registers to spare.
#pragma once

#include "attn/mask.cuh"
#include "attn/sequence.cuh"
#include "attn/wgmma/config.cuh"
#include "hopper/tile_schedule.cuh"

namespace qf {
namespace wgmma {

// Host side: the order of the work tiles. If all of them are equally long, a head's row tiles are consecutive:
// neighbours read the same K and V concurrently. If masks or packed sequences make some longer than others, scheduling
// is dynamic, over sections of heads whose K and V fit the L2 cache together, longest row tiles first (causal masks
// make the last ones longest). kv_lens alone count as equally long.
inline TileSchedule schedule_of(const QfAttnParams& p, int block_rows) {
  constexpr int64_t kCacheBytes = 16 << 20;  // of an L2 cache of 50 MB
  int64_t row_tiles = (int64_t(p.q_len) + block_rows - 1) / block_rows, batch = p.batch;
  if (p.cu_seqlens_q && p.total_q > 0) {  // packed rows that fit no sequence still get their NaN
    if (row_tiles == 0) row_tiles = 1;
    if (batch == 0) batch = 1;
  }
  const int64_t heads = batch * p.q_heads, group = p.kv_heads ? p.q_heads / p.kv_heads : 1;
  const int64_t head_bytes = 2 * int64_t(p.k_len) * p.head_dim * 2;
  const bool paged = p.kv.page_size > 0;  // sequences of a cache differ in length
  const bool dynamic = p.window_left >= 0 || p.window_right >= 0 || p.cu_seqlens_q || p.total_q > 0 || paged;
  const int64_t fit = !dynamic ? group : head_bytes > 0 ? kCacheBytes / head_bytes * group : heads;
  return tile_schedule(row_tiles, heads, fit < group ? group : fit, dynamic);
}

// The work tiles of packed sequences that exist: a sequence has as many row tiles as its own length needs, whereas the
// schedule counts those of the longest. Sequences come in order, each in the schedule's order. Indices must not
// decrease from one call of tile() to the next.
struct PackedTiles {
  int b = -1, first = 0, end = 0;  // sequence b has tiles first .. end - 1

  __device__ static __forceinline__ bool rows_outside(const QfAttnParams& p) {
    return p.cu_seqlens_q[0] > 0 || p.cu_seqlens_q[p.batch] < p.total_q;
  }
  __device__ static __forceinline__ int row_tiles(const QfAttnParams& p, int b, int block_rows) {
    return (p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] + block_rows - 1) / block_rows;
  }
  __device__ __forceinline__ TileSchedule::Tile tile(const QfAttnParams& p, const TileSchedule& all, int block_rows,
                                                     int index) {
    while (index >= end) {
      first = end;
      end += row_tiles(p, ++b, block_rows) * p.q_heads;
    }
    TileSchedule of_sequence{};
    of_sequence.rows = (end - first) / p.q_heads;
    of_sequence.columns = p.q_heads;
    of_sequence.section = min(all.section, p.q_heads);
    const TileSchedule::Tile tile = of_sequence.tile(index - first);
    return {tile.row, b * p.q_heads + tile.column};
  }

  // Their number, or the reason why the schedule's own tiles are used. Collective; s_sum: a word of shared memory that
  // is not used otherwise until the next barrier of the block.
  static constexpr int kNotPacked = -1, kRowsFall = -2;
  static constexpr int kUnserved = -3;  // some rows belong to no valid sequence: tiles that do not exist fill these
  template <bool kPaged>
  __device__ static inline int count(const QfAttnParams& p, int block_rows, int* s_sum) {
    if (!p.cu_seqlens_q) return kNotPacked;
    if (packed_rows_fall(p)) return kRowsFall;
    if (rows_outside(p)) return kUnserved;
    if (threadIdx.x == 0) *s_sum = 0;
    bool bad = false;
    int own = 0;
    for (int b = threadIdx.x; b < p.batch; b += blockDim.x) {
      bad |= !sequence_of<kPaged>(p, b, false).good;
      own += row_tiles(p, b, block_rows);
    }
    if (__syncthreads_or(bad)) return kUnserved;  // s_sum is cleared, too
    if (own > 0) atomicAdd(s_sum, own);
    __syncthreads();
    return *s_sum * p.q_heads;
  }
};

template <class Config>
struct WorkTile {
  Sequence seq;
  Mask mask;
  KeyRange keys, full;  // keys that some row of the block sees, and those that every row sees
  KeyRange window;      // of row0, ignoring the ends of the sequence; it moves by one key per row
  int b, h, kv_head, row_tile, row0;
  int rows;                           // of the sequence, from row0 on
  int tiles;                          // of keys; -1: there are no more work tiles
  bool unserved;                      // there are rows that no valid sequence fills
  int own_tiles[Config::kConsumers];  // leading tiles, after which a consumer sees no more
  int v_cleared;                      // some tile of V was cleared of NaN and infinity (nonfinite.cuh)
  int64_t out_at, lse_at;             // of the first row, in elements
  typename Config::Facts facts;       // if there are tiles

  // packed_tiles: PackedTiles::count().
  __device__ __forceinline__ void fill(const QfAttnParams& p, TileSchedule::Tile tile, int packed_tiles) {
    b = tile.column / p.q_heads, h = tile.column - b * p.q_heads;
    seq = sequence_of<Config::kPaged>(p, b, packed_tiles == PackedTiles::kRowsFall);
    mask = {p.window_left, p.window_right, seq.len_q, seq.len_k};
    kv_head = h / (p.q_heads / p.kv_heads), row_tile = tile.row;
    row0 = row_tile * Config::kBlockM;
    rows = seq.len_q - row0;
    unserved = !seq.good;
    if (packed_tiles < PackedTiles::kNotPacked && PackedTiles::rows_outside(p)) unserved |= b == 0 || b == p.batch - 1;
  }
  // Rejects the sequence: the page table lacks an entry that it needs.
  __device__ __forceinline__ void refuse() { seq.good = false, unserved = true; }
  // Derives the other fields.
  __device__ __forceinline__ void complete(const QfAttnParams& p) {
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    const int first = row0, last = min(first + kBlockM, mask.len_q) - 1;
    keys = full = {0, 0};
    if (exists()) {
      keys = mask.seen_by_any(first, last);
      full = mask.seen_by_all(first, last);
    }
    keys.begin = keys.begin / Config::kFirstKey * Config::kFirstKey;
    tiles = (keys.end - keys.begin + kBlockN - 1) / kBlockN;
#pragma unroll 1
    for (int c = 0; c < Config::kConsumers; ++c) {  // a consumer without rows takes one tile
      const int own = first + c * kWarpgroupRows, own_last = min(own + kWarpgroupRows, mask.len_q) - 1;
      const int end = tiles > 0 && own <= own_last ? mask.seen_by_any(own, own_last).end : 0;
      own_tiles[c] = Config::kSkipsTiles ? max(1, (end - keys.begin + kBlockN - 1) / kBlockN) : tiles;
    }
    window = mask.window_at(first, kBlockM);
    v_cleared = 0;
    out_at = b * p.out.stride_b + h * p.out.stride_h + (seq.q0 + first) * p.out.stride_t;
    lse_at = b * p.lse_stride_b + h * p.lse_stride_h + seq.q0 + first;
  }
  __device__ __forceinline__ bool exists() const { return seq.good && rows > 0; }
  // How many work tiles of this head share its unserved rows. Sequences that miss a page are not known when packed
  // tiles are counted, so they may only have the tiles with rows of their own.
  __device__ __forceinline__ int unserved_shares(int row_tiles) const {
    if (!Config::kPaged) return row_tiles;
    const int64_t own = (seq.owned + Config::kBlockM - 1) / Config::kBlockM;
    return own < 1 ? 1 : own < row_tiles ? int(own) : row_tiles;
  }
  // Does every row of the block see all keys key0 .. key0 + kBlockN - 1?
  __device__ __forceinline__ bool whole(int key0) const {
    return key0 >= full.begin && key0 + Config::kBlockN <= full.end;
  }
};

}  // namespace wgmma
}  // namespace qf
