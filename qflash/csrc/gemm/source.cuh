// What a tile of w is loaded from: one matrix or two.
#pragma once

#include "gemm/bytes.cuh"

namespace qf {
namespace gemm {

//   kOne       one matrix
//   kPaired    two side by side, half of a tile's columns each: of SwiGLU both products come from one tile
//   kChained   two one after the other along k, half of the steps each: x w + x' w' is one product of twice the depth
enum class Source { kOne, kPaired, kChained };

// The matrix of a step, and the step within it.
template <Source kSource>
struct StepsOf {
  const ByteMatrix* x;
  int steps;  // of all

  __device__ __forceinline__ const ByteMatrix& matrix(int step) const {
    return kSource == Source::kChained ? x[step >= steps / 2] : x[0];
  }
  __device__ __forceinline__ int within(int step) const {
    return kSource == Source::kChained && step >= steps / 2 ? step - steps / 2 : step;
  }
};

}  // namespace gemm
}  // namespace qf
