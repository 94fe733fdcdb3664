// The source of a tile of w: one matrix or two.
#pragma once

#include "gemm/bytes.cuh"

namespace qf {
namespace gemm {

//   kOne       one matrix
//   kPaired    two side by side, half of a tile's columns each: one tile has both products of SwiGLU
//   kChained   two in sequence along k: x w + x' w' is one product of twice the depth; or one matrix
enum class Source { kOne, kPaired, kChained };

// The matrix of a step, and the step within it.
template <Source kSource>
struct StepsOf {
  const ByteMatrix* x;
  int first;  // steps of the first of two chained matrices

  __device__ __forceinline__ const ByteMatrix& matrix(int step) const {
    return kSource == Source::kChained ? x[step >= first] : x[0];
  }
  __device__ __forceinline__ int within(int step) const {
    return kSource == Source::kChained && step >= first ? step - first : step;
  }
};

}  // namespace gemm
}  // namespace qf
