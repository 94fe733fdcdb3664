// Loads tiles of q, k, v and dout into shared memory, for both kernels of `fa_mma_bwd`.
#pragma once

#include "attn/mma/tile.cuh"
#include "attn/sequence.cuh"
#include "kernels/attention_backward/fa_mma_bwd/config.h"

namespace qf {
namespace fa_mma_bwd {

// Which tensors may be copied 16 bytes at a time, and which be read in vectors of four.
struct Access {
  bool q, k, v, dout, dq, dk, dv;
  Vectorises vector;
  bool vector_dout;
};

// s_tile <- rows row0 .. of a tensor that is not rotated. kAsync: asynchronously; all tensors are aligned.
template <bool kAsync, class Walk>
__device__ __forceinline__ void load_plain(char* s_tile, const HeadRows<Element>& x, int row0, bool aligned) {
  if constexpr (kAsync)
    copy_async<Walk>(s_tile, x.g_head, x.stride_t, row0, x.length, x.head_dim);
  else
    copy_through_registers<Walk>(s_tile, x, row0, aligned);
}

// The same for q and k, which are rotated where there is a rope.
template <bool kAsync, class Walk>
__device__ __forceinline__ void load_q(char* s_tile, const QfAttnParams& p, const Sequence& seq, int b, int h, int row0,
                                       const Access& access) {
  const HeadRows<Element> q(p.q, b, seq.q0, h, seq.len_q, p.head_dim, access.vector.q);
  if (!kAsync && p.rope.cos)
    copy_rotated<Walk>(s_tile, q, row0, p.rope, access.vector.rope,
                       [&](int i) { return position_q(p.rope, b, seq.q0, i, seq.len_q, seq.len_k); });
  else
    load_plain<kAsync, Walk>(s_tile, q, row0, access.q);
}
template <bool kAsync, class Walk>
__device__ __forceinline__ void load_k(char* s_tile, const QfAttnParams& p, const Sequence& seq, int b, int kv_head,
                                       int row0, const Access& access) {
  const HeadRows<Element> k(p.kv.k, b, seq.k0, kv_head, seq.len_k, p.head_dim, access.vector.k);
  if (!kAsync && p.rope.cos)
    copy_rotated<Walk>(s_tile, k, row0, p.rope, access.vector.rope,
                       [&](int j) { return position_k(p.rope, b, seq.k0, j); });
  else
    load_plain<kAsync, Walk>(s_tile, k, row0, access.k);
}
template <bool kAsync, class Walk>
__device__ __forceinline__ void load_v(char* s_tile, const QfAttnParams& p, const Sequence& seq, int b, int kv_head,
                                       int row0, const Access& access) {
  load_plain<kAsync, Walk>(
      s_tile, HeadRows<Element>(p.kv.v, b, seq.k0, kv_head, seq.len_k, p.head_dim, access.vector.v), row0, access.v);
}
template <bool kAsync, class Walk>
__device__ __forceinline__ void load_dout(char* s_tile, const QfAttnBwdParams& params, const Sequence& seq, int b,
                                          int h, int row0, const Access& access) {
  load_plain<kAsync, Walk>(
      s_tile, HeadRows<Element>(params.dout, b, seq.q0, h, seq.len_q, params.fwd.head_dim, access.vector_dout), row0,
      access.dout);
}

}  // namespace fa_mma_bwd
}  // namespace qf
