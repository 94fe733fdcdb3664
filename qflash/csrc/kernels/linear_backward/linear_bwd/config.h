// The passes of `linear_bwd` other than its products are specialised for -DQF_DTYPE (a QfDtype); activations are chosen
// at run time.
#pragma once

#include "gemm/epilogue.cuh"

namespace qf {
namespace linear_bwd {

using Element = ElementOf<QF_DTYPE>::Type;

// The pass over elements: a block has 32 lanes x 16 bytes of columns and a chunk of rows, its warps take rows in turn.
// Chunks, and so the order of every sum, depend on the number of rows alone.
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kLaneColumns = 16 / int(sizeof(Element)), kTileColumns = 32 * kLaneColumns;
constexpr int64_t kLeastChunkRows = 64, kMostChunks = 128;
constexpr int kSumsSharedBytes = 2 * kWarps * kTileColumns * int(sizeof(float));
constexpr int kTotalsSharedBytes = kWarps * 32 * int(sizeof(double));

__host__ __device__ constexpr int64_t chunks_of(int64_t rows) {
  const int64_t chunks = (rows + kLeastChunkRows - 1) / kLeastChunkRows;
  return chunks < kMostChunks ? chunks : kMostChunks;
}

// Columns of dh, padded to whole vectors; of dh and du in sequence, each to whole steps of any kernel's product.
constexpr int64_t kStepColumns = 64;
constexpr int64_t padded_columns(int64_t n, bool gated) {
  const int64_t unit = gated ? kStepColumns : kLaneColumns;
  return (n + unit - 1) / unit * unit;
}

}  // namespace linear_bwd
}  // namespace qf
