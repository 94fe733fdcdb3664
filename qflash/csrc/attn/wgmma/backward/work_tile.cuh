// A work tile of the backward pass: kBlockM rows of one head of one sequence, against all columns that these rows see.
// One thread describes it for the whole block, ahead of time and in shared memory.
#pragma once

#include "attn/backward/ds_tiles.h"
#include "attn/mask.cuh"
#include "attn/sequence.cuh"
#include "attn/wgmma/backward/config.cuh"
#include "attn/wgmma/softmax.cuh"
#include "hopper/tile_schedule.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// Host side: the order of the work tiles of `pairs` (sequence, KV head) pairs. With masks and packed sequences some
// work tiles are longer than others: scheduling is then dynamic, over sections of heads whose columns fit the L2 cache
// together, longest first.
template <class Config>
inline TileSchedule schedule_of(const QfAttnParams& p, int64_t pairs) {
  constexpr int64_t kCacheBytes = 16 << 20;  // of an L2 cache of 50 MB
  constexpr bool kKeys = Config::kKeysStay;
  const int64_t length = kKeys ? p.k_len : p.q_len, total = kKeys ? p.total_k : p.total_q;
  int64_t row_tiles = (length + Config::kBlockM - 1) / Config::kBlockM;
  if (p.cu_seqlens_q && total > 0) {  // packed rows that fit no sequence still get their NaN
    if (row_tiles == 0) row_tiles = 1;
    if (pairs == 0) pairs = p.kv_heads;
  }
  const int64_t group = p.kv_heads ? p.q_heads / p.kv_heads : 1, heads = pairs * (kKeys ? 1 : group);
  const int64_t of_head = 2 * int64_t(kKeys ? group * p.q_len : p.k_len) * p.head_dim * 2;  // bytes of columns
  const int64_t sharing = kKeys ? 1 : group;  // heads that read the same columns
  const bool dynamic = p.window_left >= 0 || p.window_right >= 0 || p.cu_seqlens_q || total > 0;
  int64_t fit = !dynamic ? sharing : of_head > 0 ? kCacheBytes / of_head * sharing : heads;
  // If there are few work tiles, all of the longest come first: one that started last would delay the whole grid.
  constexpr int64_t kFewTiles = 1024;
  if (dynamic && heads * row_tiles <= kFewTiles) fit = heads;
  return tile_schedule(row_tiles, heads, fit < sharing ? sharing : fit, dynamic);
}

// dS in the workspace, for the (sequence, KV head) pairs from first_column on. g_tiles is nullptr if dS is not stored.
struct DsMemory {
  char* g_tiles;
  DsTiles tiles;
  int first_column;
};

// Packed offsets that decrease somewhere: which sequence owns which rows is then undefined.
struct PackedFaults {
  bool q_falls, k_falls;

  // Collective: every thread of the block calls it.
  __device__ static __forceinline__ PackedFaults find(const QfAttnParams& p) {
    if (!p.cu_seqlens_q) return {false, false};
    bool falls = p.batch == 0;
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x) falls |= p.cu_seqlens_k[i + 1] < p.cu_seqlens_k[i];
    if (threadIdx.x == 0) falls |= p.cu_seqlens_k[0] < 0;
    const bool k_falls = __syncthreads_or(falls);
    return {packed_rows_fall(p), k_falls};
  }
};

// The first of this warp's rows, in the block's tile.
template <class Config>
__device__ __forceinline__ int first_own_row() {
  return warp_row() % Config::kBlockM;
}

// Row i of the 16 that a warp holds in its accumulators, as a row of the block's tile.
template <class Config>
__device__ __forceinline__ int own_row(int i) {
  const int row = first_own_row<Config>() + i;
  return Config::kFromDs ? row - row % kDsTile + query_of_ds(row % kDsTile) : row;
}

template <class Config>
struct WorkTile {
  Sequence seq;
  Mask mask;                         // of columns, as rows see them; if rows are keys, the mask of queries, inverted
  KeyRange columns, full;            // columns that some row of the block sees, and those that every row sees; if dS
                                     // is stored, rows that take no part count too
  KeyRange window;                   // of row0, ignoring the ends of the sequence; it moves by one column per row
  KeyRange own[Config::kConsumers];  // the range of tiles of columns that each consumer's rows see
  int b, row_tile, row_head;
  int column_head, heads;            // the first head that the rows see, and the number of heads
  int ds_head;                       // the first query head, counted from the first whose dS is stored
  int ds_place[Config::kConsumers];  // of a consumer's keys, in strips of dS
  int row0;
  int live;       // rows that take part, from row0 on; keys past kv_lens do not
  int rows;       // rows to be stored, from row0 on: those that take no part get zeros
  int tiles;      // of columns, of one head; -1: there are no more work tiles
  bool unserved;  // there are rows that no valid sequence fills
  bool falls;     // the offsets of some sequence decrease: row ownership is undefined
  int cleared;    // NaN or infinity was cleared somewhere (inspect.cuh)

  __device__ __forceinline__ void fill(const QfAttnParams& p, TileSchedule::Tile tile, int row_tiles,
                                       const DsMemory& ds, const PackedFaults& faults) {
    constexpr bool kKeys = Config::kKeysStay;
    const int of_sequence = kKeys ? p.kv_heads : p.q_heads, group = p.q_heads / p.kv_heads;
    const int column = ds.first_column * (kKeys ? 1 : group) + tile.column;
    b = column / of_sequence, row_head = column - b * of_sequence;
    ds_head = tile.column * (kKeys ? group : 1);
    column_head = kKeys ? row_head * group : row_head / group;
    heads = kKeys ? group : 1;
    // Causal masks leave most columns to the first keys, and to the last queries: those rows come first.
    row_tile = kKeys ? row_tiles - 1 - tile.row : tile.row;
    row0 = row_tile * Config::kBlockM;
    if (kKeys && ds.g_tiles)
      for (int c = 0; c < Config::kConsumers; ++c)
        ds_place[c] = ds.tiles.place((row0 + c * kWarpgroupRows % Config::kBlockM) / kDsTile);
    seq = sequence_of(p, b, faults.q_falls);
    falls = faults.q_falls || (kKeys && faults.k_falls);
    seq.good = seq.good && !falls;
    unserved = !seq.good || (p.cu_seqlens_q && (b == 0 || b == p.batch - 1) && rows_outside(p));
    mask = kKeys ? Mask{p.window_right, p.window_left, seq.len_k, seq.len_q}
                 : Mask{p.window_left, p.window_right, seq.len_q, seq.len_k};
    const int owned = !kKeys ? seq.len_q : p.cu_seqlens_k && seq.good ? key_rows(p) : p.k_len;
    rows = seq.good ? owned - row0 : 0;
    live = seq.good ? mask.len_q - row0 : 0;
  }
  // Derives the other fields.
  __device__ __forceinline__ void complete() {
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    columns = full = {0, 0};
    const int last = min(row0 + kBlockM, mask.len_q) - 1;
    if (live > 0) {
      columns = mask.seen_by_any(row0, last);
      full = mask.seen_by_all(row0, last);
      if (Config::kStoresDs && live < kBlockM) full = {0, 0};  // rows that take no part see nothing
    }
    if (Config::kWholeTiles) columns.begin -= columns.begin % kBlockN;
    tiles = (columns.end - columns.begin + kBlockN - 1) / kBlockN;
#pragma unroll 1
    for (int c = 0; c < Config::kConsumers; ++c) {
      const int first = row0 + c * kWarpgroupRows % kBlockM, own_last = min(first + kWarpgroupRows, mask.len_q) - 1;
      const KeyRange met = tiles > 0 && first <= own_last ? mask.seen_by_any(first, own_last) : KeyRange{0, 0};
      own[c] = {0, 0};
      if (met.begin < met.end)
        own[c] = {(met.begin - columns.begin) / kBlockN, (met.end - columns.begin + kBlockN - 1) / kBlockN};
    }
    window = mask.window_at(row0, kBlockM);
    cleared = 0;
  }
  // Does every row of the block see all columns column0 .. column0 + kBlockN - 1?
  __device__ __forceinline__ bool whole(int column0) const {
    return column0 >= full.begin && column0 + Config::kBlockN <= full.end;
  }
  // The first row of this tile, and its first column, as row indices of the tensors that hold them.
  __device__ __forceinline__ int64_t first_row() const { return (Config::kKeysStay ? seq.k0 : seq.q0) + row0; }
  __device__ __forceinline__ int64_t first_column() const {
    return (Config::kKeysStay ? seq.q0 : seq.k0) + columns.begin;
  }
  __device__ __forceinline__ static bool rows_outside(const QfAttnParams& p) {
    const int32_t* const offsets = Config::kKeysStay ? p.cu_seqlens_k : p.cu_seqlens_q;
    return offsets[0] > 0 || offsets[p.batch] < (Config::kKeysStay ? p.total_k : p.total_q);
  }

 private:
  __device__ __forceinline__ int key_rows(const QfAttnParams& p) const {
    return p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b];
  }
};

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
