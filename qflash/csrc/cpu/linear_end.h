// Epilogue of a row of a linear layer, whatever its sums were computed with: h and u are stored for the backward pass,
// then the activation, the residual and one rounding are applied.
#pragma once

#include "activation.h"
#include "qflash_ops.h"
#include "rows.h"

namespace qf {
namespace QF_ISA {

// bias[first, first + count) as float32; zeros where there is none.
static inline void load_bias(float* destination, const void* bias, int32_t dtype, int64_t first, int count) {
  if (bias)
    load_row(destination, static_cast<const char*>(bias) + first * element_bytes(dtype), dtype, count);
  else
    memset(destination, 0, size_t(count) * 4);
}

// h <- activation(h), of SwiGLU with u; whole vectors.
struct ActivateRow {
  float* h;
  const float* u;
  int count;

  template <int kActivation>
  void run() const {
    if constexpr (kActivation == QF_IDENTITY) return;
    for (int c = 0; c < count; c += kLanes)
      store(h + c, activated<kActivation>(load(h + c), kActivation == QF_SWIGLU ? load(u + c) : zero()));
  }
};

// out[row][first .. +count] from h and, with SwiGLU, u: float32 with room for whole vectors, as `spare` is. All of them
// are overwritten.
static inline void end_row(const QfLinearParams& p, int64_t row, int64_t first, int count, float* h, float* u,
                           float* spare) {
  const int64_t bytes = element_bytes(p.out_dtype);
  if (p.pre) store_row(static_cast<char*>(p.pre) + (row * p.n + first) * bytes, h, p.out_dtype, count);
  if (p.pre_up) store_row(static_cast<char*>(p.pre_up) + (row * p.n + first) * bytes, u, p.out_dtype, count);
  with_activation(p.activation, ActivateRow{h, u, count});
  if (p.residual) {
    const char* from = static_cast<const char*>(p.residual) + (row * p.residual_stride_m + first) * bytes;
    load_row(spare, from, p.out_dtype, count);
    for (int c = 0; c < count; c += kLanes) store(h + c, load(h + c) + load(spare + c));
  }
  store_row(static_cast<char*>(p.out) + (row * p.out_stride_m + first) * bytes, h, p.out_dtype, count);
}

}  // namespace QF_ISA
}  // namespace qf
