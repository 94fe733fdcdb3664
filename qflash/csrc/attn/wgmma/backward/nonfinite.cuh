// Restores NaN and infinity of columns that the inspectors cleared (inspect.cuh), in the rows that do see them.
#pragma once

#include "attn/rope.cuh"
#include "attn/tile_load.cuh"
#include "attn/wgmma/backward/store.cuh"

namespace qf {
namespace wgmma {
namespace backward {

// Calls add(head, i, row) for every row of this warp and every column i of a head that it sees, in tiles that were
// inspected.
template <class Config, class Add>
__device__ inline void for_each_cleared(const WorkTile<Config>& work, Add add) {
  for (int head = 0; head < work.heads; ++head)
    for (int n = 0; n < work.tiles; ++n) {
      const int column0 = work.columns.begin + n * Config::kBlockN;
      if (work.whole(column0)) continue;
      for (int i = column0; i < min(column0 + Config::kBlockN, work.mask.len_k); ++i)
        for (int own = 0; own < 16; ++own) {
          const int row = own_row<Config>(own);
          const KeyRange met = work.mask.visible(work.row0 + row);
          if (row < work.live && i >= met.begin && i < met.end) add(work.column_head + head, i, row);
        }
    }
}

template <class Element>
__device__ __forceinline__ void add_to(Element& to, float x) {
  from_float(to_float(to) + x, to);
}

__device__ __forceinline__ bool is_nonfinite(float x) { return !(x * 0.0f == 0.0f); }

// Is channel d of a row, rotated as the MMA reads it, NaN or infinity?
template <class Element>
__device__ __forceinline__ bool rotated_nonfinite(const QfRope& rope, const Element* g_row, int d) {
  bool found = is_nonfinite(to_float(g_row[d]));
  if (rope.cos && d < rope.rotary_dim) {
    const int half = rope.rotary_dim / 2, partner = rope.interleaved ? d ^ 1 : d < half ? d + half : d - half;
    found |= is_nonfinite(to_float(g_row[partner]));
  }
  return found;
}

// What a query with NaN or infinity contributes to keys that see it. A weight is never zero, so dV gets dO itself; dK
// gets dS Q, which is NaN wherever Q is nonfinite: either S is NaN, or it is past the softcap where dS is 0.
// kKeys, kValues: adds to dK, to dV.
template <class Config, bool kKeys = true, bool kValues = true>
__device__ inline void add_nonfinite_queries(const QfAttnBwdParams& params, const WorkTile<Config>& work) {
  using Element = typename Config::Element;
  const QfAttnParams& p = params.fwd;
  const auto column = [&](const QfTensor& x, int head, int i) {
    return HeadRows<Element>(x, work.b, work.seq.q0, head, 0, 0, false).row(i);
  };
  __syncwarp();  // other lanes modify what this one stored
  for_each_cleared(work, [&](int head, int i, int row) {
    for (int d = lane_index(); d < p.head_dim; d += 32) {
      const float dout = to_float(column(params.dout, head, i)[d]);
      if (kValues && is_nonfinite(dout)) add_to(row_of<Config>(params.dv, work, row)[d], dout);
      if (kKeys && rotated_nonfinite(p.rope, column(p.q, head, i), d))
        add_to(row_of<Config>(params.dk, work, row)[d], nan());
    }
  });
}

// The same for dQ, which gets dS K.
template <class Config>
__device__ inline void add_nonfinite_keys(const QfAttnBwdParams& params, const WorkTile<Config>& work) {
  using Element = typename Config::Element;
  const QfAttnParams& p = params.fwd;
  __syncwarp();  // other lanes modify what this one stored
  for_each_cleared(work, [&](int head, int i, int row) {
    const Element* const g_key = HeadRows<Element>(p.kv.k, work.b, work.seq.k0, head, 0, 0, false).row(i);
    for (int d = lane_index(); d < p.head_dim; d += 32)
      if (rotated_nonfinite(p.rope, g_key, d)) add_to(row_of<Config>(params.dq, work, row)[d], nan());
  });
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
