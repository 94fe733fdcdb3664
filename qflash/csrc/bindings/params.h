// What the Python trampolines and the XLA handlers share when they fill QfAttnParams: results are contiguous.
#ifndef QFLASH_BINDINGS_PARAMS_H_
#define QFLASH_BINDINGS_PARAMS_H_

#include <cstdint>

#include "exceptions.h"
#include "qflash.h"

namespace qflash {

using AttnEntry = int (*)(const QfAttnParams*, void*);
using AttnBwdEntry = int (*)(const QfAttnBwdParams*, void*);
using WorkspaceBytes = int64_t (*)(const QfAttnParams*);

// A contiguous [batch, length, heads, head_dim] array, or a packed [total, heads, head_dim] one.
inline QfTensor contiguous(bool packed, int64_t length, int64_t heads, int64_t head_dim) {
  return {nullptr, packed ? 0 : length * heads * head_dim, heads * head_dim, head_dim};
}

// Strides of out and lse, once the sizes are set.
inline void set_result_strides(QfAttnParams& p, bool packed) {
  p.out = contiguous(packed, p.q_len, p.q_heads, p.head_dim);
  p.lse_stride_h = packed ? p.total_q : p.q_len;
  p.lse_stride_b = packed ? 0 : int64_t(p.q_heads) * p.q_len;
}

// Strides of dout and the gradients, once fwd is set.
inline void set_gradient_strides(QfAttnBwdParams& p, bool packed) {
  p.dout = p.dq = p.fwd.out;
  p.dk = p.dv = contiguous(packed, p.fwd.k_len, p.fwd.kv_heads, p.fwd.head_dim);
}

}  // namespace qflash

#endif  // QFLASH_BINDINGS_PARAMS_H_
