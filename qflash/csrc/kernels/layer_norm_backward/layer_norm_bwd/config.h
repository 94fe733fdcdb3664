// `layer_norm_bwd` is specialised for -DQF_DTYPE (a QfDtype) alone; shapes are chosen at run time
// (reduce/row_shape.cuh).
#pragma once

#include "reduce/row_shape.cuh"

namespace qf {
namespace layer_norm_bwd {

using Element = ElementOf<QF_DTYPE>::Type;

// Of each of two rows.
constexpr int kMostGranules = 32 / kGranule<Element>;

// Of rows that stay in registers: two of float32 are too much for 64 registers per thread in a block of 1024 threads.
constexpr int kMostColumns = sizeof(Element) == 4 ? kWholeColumns / 2 : kWholeColumns;

// Of a block on rows that are read twice. 1024 threads would have 64 registers each, which is too few here.
constexpr int kLongThreads = 512, kLongGranules = 16 / kGranule<Element>;

// Sums over rows: a block has 64 columns of a chunk of rows, its warps take rows in turn. Chunks, and so the order of
// every sum, depend on the number of rows alone.
constexpr int kSumWarps = 8, kLaneColumns = 2, kSumColumns = 32 * kLaneColumns;
constexpr int64_t kLeastChunkRows = 64, kMostChunks = 128;

__host__ __device__ constexpr int64_t chunks_of(int64_t rows) {
  const int64_t chunks = (rows + kLeastChunkRows - 1) / kLeastChunkRows;
  return chunks < kMostChunks ? chunks : kMostChunks;
}

}  // namespace layer_norm_bwd
}  // namespace qf
