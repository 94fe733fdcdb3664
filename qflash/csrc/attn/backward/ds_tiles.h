// dS in the workspace, between the kernel that computes it with dK and dV and the one that multiplies it by K to get
// dQ. The alternative is to recompute S, P and dP for dQ: seven matrix products instead of five.
//
// dS is stored in tiles of 64 keys and 64 queries, 16 bits per element, and only where some query of the tile sees some
// key of it. A bulk copy can load a tile into shared memory unchanged: it has one row of 128 bytes per key, with
// 16-byte chunks permuted by the 128-byte swizzle (smem/swizzle.cuh). The queries of a row are in the order in which a
// quad of lanes holds them in accumulators of mma and wgmma, so that a lane stores 16 bytes at once and 4 lanes fill
// 64 bytes (query_of_ds, chunk_of_ds). This permutes the rows of dQ, and nothing else.
//
// A head's tiles are grouped in strips: the stored tiles of one query tile. Where only keys to the right are hidden
// (causal masks), a strip holds the tiles of query tile i and, from its end, those of query tile n - 1 - i. Where a
// window hides keys on both sides, the key tiles of a strip wrap around.
#pragma once

#include <stdint.h>

#include "attn/mask.cuh"
#include "qflash.h"

namespace qf {

constexpr int kDsTile = 64;  // queries, and keys
constexpr int kDsTileBytes = kDsTile * kDsTile * 2;

// Offset of the 16 bytes of dS of key `key` and queries 32 half + {2t, 2t+1, 8+2t, 8+2t+1, .. 24+2t+1} in a tile.
__host__ __device__ constexpr int chunk_of_ds(int key, int half, int t) {
  return key * (2 * kDsTile) + ((4 * half + t) ^ (key % 8)) * 16;
}
// The query at position m of a row, and so the row of dQ that is row m of the product.
__host__ __device__ constexpr int query_of_ds(int m) { return m / 32 * 32 + m % 8 / 2 * 8 + m / 8 % 4 * 2 + m % 2; }

struct DsTiles {
  int query_tiles;  // per head
  int strip;        // in tiles
  int strips;       // per head
  bool folded;      // a strip holds two query tiles
  int columns;      // pairs of a sequence and a KV head that are stored at a time; 0: none, dS is recomputed

  __host__ __device__ __forceinline__ int64_t head_tiles() const { return int64_t(strips) * strip; }
  // Position in a strip of the tiles of a key tile, counted from the end at which their query tile begins.
  __host__ __device__ __forceinline__ int place(int key_tile) const { return key_tile % strip; }
  // The tile of a query tile and the key tile at `place`. `head`: the query head, counted from the first that is
  // stored.
  __host__ __device__ __forceinline__ int64_t tile(int head, int query_tile, int place) const {
    const int mirrored = query_tiles - 1 - query_tile;
    const bool from_end = folded && query_tile < mirrored;
    const int row = folded && !from_end ? mirrored : query_tile, at = from_end ? strip - 1 - place : place;
    return int64_t(head * strips + row) * strip + at;
  }
  int64_t bytes(int group) const { return int64_t(columns) * group * head_tiles() * kDsTileBytes; }
};

// Host side: how dS of a problem is stored within `limit` bytes. Whether that pays off is for the caller to decide
// (ops/backward_memory.py).
inline DsTiles ds_tiles(const QfAttnParams& p, int64_t limit) {
  DsTiles tiles{};
  if (limit <= 0) return tiles;
  if (p.cu_seqlens_q || p.total_q > 0 || p.total_k > 0) return tiles;  // the longest sequence would set the size of all
  if (p.q_len <= 0 || p.k_len <= 0 || p.batch <= 0 || p.q_heads <= 0 || p.kv_heads <= 0) return tiles;
  const auto tiles_of = [](int64_t tokens) { return int((tokens + kDsTile - 1) / kDsTile); };
  const int key_tiles = tiles_of(p.k_len);
  tiles.query_tiles = tiles.strips = tiles_of(p.q_len);
  tiles.strip = key_tiles;
  if (p.window_right >= 0 && p.window_left >= 0) {
    // Tiles of keys that 64 queries see, wherever the first of these keys is in its tile.
    const int64_t most = tiles_of(int64_t(p.window_left) + p.window_right + kDsTile) + 1;
    if (most < tiles.strip) tiles.strip = int(most);
  } else if (p.window_right >= 0) {
    // Sequences that kv_lens shortens have fewer.
    const Mask mask = {-1, p.window_right, p.q_len, p.k_len};
    const auto seen = [&](int query_tile) {
      const int last = (query_tile + 1) * kDsTile < p.q_len ? (query_tile + 1) * kDsTile - 1 : p.q_len - 1;
      return tiles_of(mask.seen_by_any(query_tile * kDsTile, last).end);
    };
    int longest = 1;
    for (int i = 0; 2 * i < tiles.query_tiles; ++i) {
      const int mirrored = tiles.query_tiles - 1 - i, both = seen(i) + (i < mirrored ? seen(mirrored) : 0);
      longest = both > longest ? both : longest;
    }
    tiles.folded = true;
    tiles.strip = longest;
    tiles.strips = (tiles.query_tiles + 1) / 2;
  }
  const int64_t group = p.q_heads / p.kv_heads, of_column = group * tiles.head_tiles() * kDsTileBytes;
  const int64_t all = int64_t(p.batch) * p.kv_heads, fit = limit / of_column;
  if (fit <= 0) return tiles;
  const int64_t sections = (all + fit - 1) / fit;  // with equally many columns each
  tiles.columns = int((all + sections - 1) / sections);
  return tiles;
}

}  // namespace qf
