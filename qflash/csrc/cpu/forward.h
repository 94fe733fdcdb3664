// The interface between the scheduler (engine.cc, compiled once) and the forward kernels (compiled per ISA).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "qflash.h"
#include "sequence.h"

namespace qf {

// Keys per tile. Tiles start at multiples of it, in every block and split, so that a row's bits depend on the
// problem alone.
constexpr int kTileKeys = 128;
// Rows (queries times heads of a group) up to which K is read in place, row by row; above, it is packed.
constexpr int64_t kDirectRows = 16;

// Floats of a packed tile of any ISA: K, V padded to whole vectors, and a last float that is 1 when V is all finite.
static inline int64_t packed_tile_floats(int64_t head_dim) {
  return kTileKeys * (head_dim + (head_dim + 15) / 16 * 16) + 16;
}

// Queries [first_query, first_query + queries) of heads [first_head, first_head + heads), all of one KV head, against
// keys [key_begin, key_end). Row r is head r / queries, query r % queries.
struct RowBlock {
  Sequence sequence;
  int64_t kv_head;
  int64_t first_head, heads;
  int64_t first_query, queries;
  int64_t key_begin, key_end;
  bool direct;          // few rows: read K and V in place
  const float* packed;  // the KV head's tiles, from key 0, as pack_tile writes them; NULL: pack or read in place
  float* partial;       // NULL: write out and lse. Else [rows][head_dim + 2]: O, m, l of this split
};

}  // namespace qf

QF_DECLARE_PER_ISA(
    // Runs a block; QF_OK, QF_NO_MEMORY or QF_INTERRUPTED.
    int forward_block(const QfAttnParams& p, const RowBlock& block);
    // Packs keys [first_key, first_key + kTileKeys), as many as exist, and their values.
    int pack_tile(const QfAttnParams& p, const Sequence& sequence, int64_t kv_head, int64_t first_key, float* tile);
    // Merges `splits` partial results of `block`, which are consecutive at block.partial, into out and lse.
    int merge_splits(const QfAttnParams& p, const RowBlock& block, int64_t splits))
