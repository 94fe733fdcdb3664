// Host side: how the launch of a decode kernel cuts the tiles of all sequences into runs (share.cuh), and the memory
// that blocks leave their parts in (merge.cuh).
#pragma once

#include "attn/decode/merge.cuh"
#include "attn/decode/share.cuh"

namespace qf {
namespace decode {

// Rows of a KV head.
inline int rows_of(const QfAttnParams& p) { return p.kv_heads > 0 ? p.q_len * (p.q_heads / p.kv_heads) : 0; }

// Places of a unit of so many tiles.
template <int kBlockN>
int64_t places_of(const QfAttnParams& p, int64_t tiles) {
  const int64_t each = p.batch_invariant ? split_tiles<kBlockN>(int(tiles), p.kv_heads) : 1;
  return tiles == 0 ? 1 : (tiles + each - 1) / each;
}

template <int kBlockN>
int64_t most_tiles(const QfAttnParams& p) {
  return p.k_len / kBlockN + 1;
}
// Of a unit of any length. A longer one may have larger splits, and fewer of them.
template <int kBlockN>
int64_t most_places(const QfAttnParams& p) {
  const int64_t tiles = most_tiles<kBlockN>(p);
  if (!p.batch_invariant) return tiles;
  const int64_t least = split_tiles<kBlockN>(1, p.kv_heads), smallest = (tiles + least - 1) / least;
  return smallest < most_splits(p.kv_heads) ? smallest : most_splits(p.kv_heads);
}

// Do 32 bits not count the tiles of all sequences?
template <int kBlockN>
bool too_many_tiles(const QfAttnParams& p) {
  return int64_t(p.batch) * p.kv_heads * most_tiles<kBlockN>(p) >= 1 << 30;
}

// As many runs as there are multiprocessors for, and no more than there are places.
template <int kBlockN>
Runs runs_of(const QfAttnParams& p, int processors) {
  Runs runs{};
  runs.chunk = unsigned(chunk_heads(p.kv_heads));
  runs.chunks = unsigned(p.kv_heads) / runs.chunk;
  const int64_t fit = processors < int(runs.chunk) ? 1 : processors / runs.chunk;
  const int64_t most = int64_t(p.batch) * runs.chunks * most_places<kBlockN>(p);
  runs.count = unsigned(fit < most ? fit : most);
  if (p.kv_lens || runs.count == 0) return runs;
  const Mask mask = {p.window_left, p.window_right, p.q_len, p.k_len};  // all sequences are as long
  const KeyRange seen = mask.seen_by_any(0, p.q_len - 1);
  const int first = seen.begin / kBlockN * kBlockN;
  const int tiles = seen.begin == seen.end ? 0 : (seen.end - first + kBlockN - 1) / kBlockN;
  runs.places = unsigned(places_of<kBlockN>(p, tiles));
  runs.each = unsigned((int64_t(p.batch) * runs.chunks * runs.places + runs.count - 1) / runs.count);
  return runs;
}

// Of the grid.
inline int64_t blocks_of(const Runs& runs) { return int64_t(runs.count) * runs.chunk; }

// Floats of what Partials points to, for a grid of `blocks` blocks that have `slots` slots together.
struct PartialFloats {
  int64_t begun, continued, own;

  PartialFloats(const QfAttnParams& p, int64_t blocks, int64_t slots) {
    const int64_t rows = rows_of(p), slot = rows * (p.head_dim + 4);
    begun = blocks * slot, continued = slots * slot;
    own = p.batch_invariant ? blocks * rows * 2 * p.head_dim : 0;
  }
  int64_t bytes() const { return int64_t(sizeof(float)) * (begun + continued + own); }
};

// Slots of a block: by default one; else as many as it may take splits of one unit.
template <int kBlockN>
int64_t slots_of(const QfAttnParams& p, const Runs& runs) {
  if (!p.batch_invariant || runs.count == 0) return 1;
  const int64_t most = most_places<kBlockN>(p), all = int64_t(p.batch) * runs.chunks * most;
  const int64_t of_run = (all + runs.count - 1) / runs.count;
  return of_run < most ? of_run : most;
}

// Bytes of Partials on any GPU of up to `processors` multiprocessors. On fewer, runs are longer and blocks have more
// slots: together they have one for each split, and less than one for each block beside those.
template <int kBlockN>
int64_t partial_bytes(const QfAttnParams& p, int processors) {
  const Runs runs = runs_of<kBlockN>(p, processors);
  const int64_t blocks = blocks_of(runs);
  if (!p.batch_invariant) return PartialFloats(p, blocks, blocks).bytes();
  const int64_t most = most_places<kBlockN>(p), together = int64_t(p.batch) * p.kv_heads * most + blocks;
  return PartialFloats(p, blocks, blocks * most < together ? blocks * most : together).bytes();
}

// In that memory.
template <int kBlockN>
Partials partials_in(float* memory, const QfAttnParams& p, const Runs& runs) {
  const int64_t blocks = blocks_of(runs), slots = slots_of<kBlockN>(p, runs);
  const PartialFloats floats(p, blocks, blocks * slots);
  float *const continued = memory + floats.begun, *const own = continued + floats.continued;
  return {memory, continued, own, rows_of(p), p.head_dim, int(slots), nullptr};
}

}  // namespace decode
}  // namespace qf
