// Host side: how the launch of a decode kernel cuts the tiles of all sequences into runs (share.cuh).
#pragma once

#include "attn/decode/share.cuh"

namespace qf {
namespace decode {

// Rows of a KV head.
inline int rows_of(const QfAttnParams& p) { return p.kv_heads > 0 ? p.q_len * (p.q_heads / p.kv_heads) : 0; }

// Places of a unit where every key is there.
template <int kBlockN>
int64_t most_places(const QfAttnParams& p) {
  return p.k_len / kBlockN + 1;
}

// Do 32 bits not count the tiles of all sequences?
template <int kBlockN>
bool too_many_tiles(const QfAttnParams& p) {
  return int64_t(p.batch) * p.kv_heads * most_places<kBlockN>(p) >= 1 << 30;
}

// As many runs as there are multiprocessors for, and no more than there are tiles.
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
  runs.places = seen.begin == seen.end ? 1 : unsigned((seen.end - first + kBlockN - 1) / kBlockN);
  runs.each = unsigned((int64_t(p.batch) * runs.chunks * runs.places + runs.count - 1) / runs.count);
  return runs;
}

// Of the grid.
inline int64_t blocks_of(const Runs& runs) { return int64_t(runs.count) * runs.chunk; }

}  // namespace decode
}  // namespace qf
