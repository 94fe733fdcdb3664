// What the entry of the gradients of linear layers (linear_bwd.cc, compiled once) requires of the kernels of an
// instruction set in addition to its products.
#pragma once

#include "isa.h"
#include "qflash_ops.h"

namespace qf {

constexpr int kStripRows = 64;      // whose shares of dbias are summed in float32; shares are added up in double
constexpr int kStripColumns = 512;  // per task

struct Strip {
  int64_t row, column;
  int rows, columns;
};

// Gradients of the two products, [m, n] of the call's dtype. Without an activation dh is dout itself.
struct ProductGradients {
  void *dh, *du;
};

}  // namespace qf

// dh and, with SwiGLU, du of a strip, unless they are dout itself; its part of dresidual; and the sums of its columns,
// which go to sums[0] and sums[1] unless those are NULL.
QF_DECLARE_PER_ISA(void linear_bwd_strip(const QfLinearBwdParams& p, const ::qf::Strip& strip,
                                         const ::qf::ProductGradients& gradients, float* const* sums);
                   // bias[column .. +columns] of `dtype` from the sums of `parts` strips, [parts, n].
                   void linear_bwd_bias(const float* sums, int64_t parts, int64_t n, int64_t column, int columns,
                                        int32_t dtype, void* bias))
