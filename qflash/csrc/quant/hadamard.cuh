// Sylvester's Hadamard matrix on a thread's registers.
#pragma once

#include "common/rounded.cuh"

namespace qf {

// x <- x times the matrix of order sixteen: butterflies only. The orthogonal matrix is a quarter of it. For order eight
// it is the first three of four rounds.
template <int kCount>
__device__ __forceinline__ void hadamard(float (&x)[kCount]) {
#pragma unroll
  for (int stride = 1; stride < kCount; stride *= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = add_rn(a, b), x[i + stride] = sub_rn(a, b);
    }
}

}  // namespace qf
