// `linear_bwd` is specialised for -DQF_DTYPE (a QfDtype) and -DQF_ARCH (compute capability times ten), which decide
// what multiplies; activations are chosen at run time.
#pragma once

#include "gemm/epilogue.cuh"

namespace qf {
namespace linear_bwd {

using Element = ElementOf<QF_DTYPE>::Type;
// Products on tensor cores by gemm_mma's kernels, else by gemm_tiled's: float32, and bfloat16 on Turing.
constexpr bool kTensorCores = QF_DTYPE == QF_F16 || (QF_DTYPE == QF_BF16 && QF_ARCH >= 80);

// The pass over elements: a block has 32 lanes x 16 bytes of columns and a chunk of rows, its warps take rows in turn.
// Chunks depend on the number of rows alone, so the order of every sum does.
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kLaneColumns = 16 / int(sizeof(Element)), kTileColumns = 32 * kLaneColumns;
constexpr int64_t kLeastChunkRows = 64, kMostChunks = 128;
constexpr int kSumsSharedBytes = 2 * kWarps * kTileColumns * int(sizeof(float));
constexpr int kTotalsSharedBytes = kWarps * 32 * int(sizeof(double));

__host__ __device__ constexpr int64_t chunks_of(int64_t rows) {
  const int64_t chunks = (rows + kLeastChunkRows - 1) / kLeastChunkRows;
  return chunks < kMostChunks ? chunks : kMostChunks;
}

// Columns of dh: whole vectors, or of two, one after the other, whole steps of a product.
constexpr int64_t padded_columns(int64_t n, bool gated) {
  const int64_t unit = gated ? 64 : kLaneColumns;
  return (n + unit - 1) / unit * unit;
}

}  // namespace linear_bwd
}  // namespace qf
