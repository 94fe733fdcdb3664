// `layer_norm_bwd` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time
// (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace layer_norm_bwd {

using Element = ElementOf<QF_DTYPE>::Type;

// Of each of two rows.
constexpr int kMostGranules = 32 / kGranule<Element>;

// Of a block on rows that are read twice: one block to a multiprocessor, so that the rows in flight fit the L2 cache.
constexpr int kLongThreads = 1024, kLongGranules = 16 / kGranule<Element>;

// Sums over rows: a block has 64 columns of a chunk of rows, its warps take rows in turn. Chunks depend on the number
// of rows alone, so the order of every sum does.
constexpr int kSumWarps = 8, kLaneColumns = 2, kSumColumns = 32 * kLaneColumns;
constexpr int64_t kLeastChunkRows = 64, kMostChunks = 128;

constexpr int64_t chunks_of(int64_t rows) {
  const int64_t chunks = (rows + kLeastChunkRows - 1) / kLeastChunkRows;
  return chunks < kMostChunks ? chunks : kMostChunks;
}

}  // namespace layer_norm_bwd
}  // namespace qf
