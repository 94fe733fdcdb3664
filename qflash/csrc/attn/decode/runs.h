// Host side: how the launch of a decode kernel cuts the tiles of all sequences into runs (share.cuh), and the memory in
// which blocks store their parts (merge.cuh).
#pragma once

#include "attn/decode/merge.cuh"
#include "attn/decode/share.cuh"

namespace qf {
namespace decode {

// Rows per KV head.
inline int rows_of(const QfAttnParams& p) { return p.kv_heads > 0 ? p.q_len * (p.q_heads / p.kv_heads) : 0; }

// Places of a unit of `tiles` tiles.
template <int kBlockN>
int64_t places_of(const QfAttnParams& p, int64_t tiles) {
  const int64_t each = p.batch_invariant ? split_tiles<kBlockN>(int(tiles), p.kv_heads) : 1;
  return tiles == 0 ? 1 : (tiles + each - 1) / each;
}

template <int kBlockN>
int64_t most_tiles(const QfAttnParams& p) {
  return p.k_len / kBlockN + 1;
}
// The most places of a unit of any length. A longer one may have larger splits, and fewer of them.
template <int kBlockN>
int64_t most_places(const QfAttnParams& p) {
  const int64_t tiles = most_tiles<kBlockN>(p);
  if (!p.batch_invariant) return tiles;
  const int64_t least = split_tiles<kBlockN>(1, p.kv_heads), smallest = (tiles + least - 1) / least;
  return smallest < most_splits(p.kv_heads) ? smallest : most_splits(p.kv_heads);
}

// Are 32 bits too few to count the tiles of all sequences?
template <int kBlockN>
bool too_many_tiles(const QfAttnParams& p) {
  return int64_t(p.batch) * p.kv_heads * most_tiles<kBlockN>(p) >= 1 << 30;
}

// As many runs as there are SMs for, and no more than there are places.
template <int kBlockN>
Runs runs_of(const QfAttnParams& p, int processors) {
  Runs runs{};
  runs.chunk = unsigned(chunk_heads(p.kv_heads));
  runs.chunks = unsigned(p.kv_heads) / runs.chunk;
  const int64_t fit = processors < int(runs.chunk) ? 1 : processors / runs.chunk;
  const int64_t most = int64_t(p.batch) * runs.chunks * most_places<kBlockN>(p);
  runs.count = unsigned(fit < most ? fit : most);
  if (p.kv_lens || runs.count == 0) return runs;
  const Mask mask = {p.window_left, p.window_right, p.q_len, p.k_len};  // all sequences have the same length
  const KeyRange seen = mask.seen_by_any(0, p.q_len - 1);
  const int first = seen.begin / kBlockN * kBlockN;
  const int tiles = seen.begin == seen.end ? 0 : (seen.end - first + kBlockN - 1) / kBlockN;
  runs.places = unsigned(places_of<kBlockN>(p, tiles));
  runs.each = unsigned((int64_t(p.batch) * runs.chunks * runs.places + runs.count - 1) / runs.count);
  return runs;
}

// Blocks of the grid.
inline int64_t blocks_of(const Runs& runs) { return int64_t(runs.count) * runs.chunk; }

// Sizes, in floats, of what Partials points to, for a grid of `blocks` blocks with `slots` slots in total.
struct PartialFloats {
  int64_t begun, continued, own;

  PartialFloats(const QfAttnParams& p, int64_t blocks, int64_t slots) {
    const int64_t rows = rows_of(p), slot = rows * (p.head_dim + 4);
    begun = blocks * slot, continued = slots * slot;
    own = p.batch_invariant ? blocks * rows * 2 * p.head_dim : 0;
  }
  int64_t bytes() const { return int64_t(sizeof(float)) * (begun + continued + own); }
};

// Slots per block: one by default; otherwise as many as the splits of one unit that it may take.
template <int kBlockN>
int64_t slots_of(const QfAttnParams& p, const Runs& runs) {
  if (!p.batch_invariant || runs.count == 0) return 1;
  const int64_t most = most_places<kBlockN>(p), all = int64_t(p.batch) * runs.chunks * most;
  const int64_t of_run = (all + runs.count - 1) / runs.count;
  return of_run < most ? of_run : most;
}

// Bytes of Partials on any GPU of up to `processors` SMs. On fewer, runs are longer and blocks have more slots: in
// total one per split, plus less than one per block.
template <int kBlockN>
int64_t partial_bytes(const QfAttnParams& p, int processors) {
  const Runs runs = runs_of<kBlockN>(p, processors);
  const int64_t blocks = blocks_of(runs);
  if (!p.batch_invariant) return PartialFloats(p, blocks, blocks).bytes();
  const int64_t most = most_places<kBlockN>(p), together = int64_t(p.batch) * p.kv_heads * most + blocks;
  return PartialFloats(p, blocks, blocks * most < together ? blocks * most : together).bytes();
}

// Partials in that memory.
template <int kBlockN>
Partials partials_in(float* memory, const QfAttnParams& p, const Runs& runs) {
  const int64_t blocks = blocks_of(runs), slots = slots_of<kBlockN>(p, runs);
  const PartialFloats floats(p, blocks, blocks * slots);
  float *const continued = memory + floats.begun, *const own = continued + floats.continued;
  return {memory, continued, own, rows_of(p), p.head_dim, int(slots), nullptr};
}

}  // namespace decode
}  // namespace qf
