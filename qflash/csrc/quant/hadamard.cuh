// Sylvester's Hadamard matrix of sixteen on a thread's registers.
#pragma once

#include "common/rounded.cuh"

namespace qf {

// x <- x times the matrix: butterflies alone. The orthogonal matrix is a quarter of it.
__device__ __forceinline__ void hadamard(float (&x)[16]) {
#pragma unroll
  for (int stride = 1; stride < 16; stride *= 2)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = add_rn(a, b), x[i + stride] = sub_rn(a, b);
    }
}

}  // namespace qf
