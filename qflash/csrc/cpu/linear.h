// Products of float matrices on the CPU: linear layers and their gradients. Each block of out is a separate task; a
// task packs what it reads of x and w, a chunk of k at a time, so that both stay in its core's cache.
//
// An element of out is the sum of its chunks in order, each a chain of multiply-adds in the order of k. Chunks are cut
// by k alone: the bits of a row depend neither on threads nor on blocks nor on the rows it is computed with.
#pragma once

#include <stdint.h>

#include "isa.h"
#include "qflash_ops.h"

namespace qf {

// A linear layer, or a sum of two products: where `second_x` is given, which has the layout of x, `up` is its weight
// and out = x w + second_x up.
struct LinearCall {
  QfLinearParams p;
  const void* second_x;
};

struct LinearBlock {
  int64_t row, column;
  int rows, columns;
};

// What each instruction set defines.
struct LinearKernel {
  int row_step, most_rows;        // of a block: a multiple of the step, up to that; half of it with SwiGLU
  int column_step, most_columns;  // likewise
  int few_rows, few_columns;      // for float32, where w runs along k: a block of so few rows has so many columns
  // Bytes of scratch that a block of this size takes; `products`: sums of an element, 2 with SwiGLU.
  int64_t (*scratch_bytes)(int rows, int columns, int products);
  // out of a block. QF_OK, or QF_INTERRUPTED.
  int (*multiply)(const LinearCall& call, const LinearBlock& block, void* scratch);
};

// All of out on the number of threads that p.num_threads requests.
int run_linear(const LinearCall& call, Isa isa);

}  // namespace qf

QF_DECLARE_PER_ISA(extern const ::qf::LinearKernel linear_floats)

#if defined(__x86_64__)
namespace qf {
namespace avx512_bf16 {
extern const LinearKernel linear_bf16;
}
namespace amx_bf16 {
extern const LinearKernel linear_bf16;
}
}  // namespace qf
#endif
