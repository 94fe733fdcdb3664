// rope: rotates every head of a token by the token's position, or rotates it back, which is the gradient of that.
//
//   a unit: n pairs of channels, in two pieces of n channels each; here n = 4
//   half-split   x0 x1 x2 x3 . . . . y0 y1 y2 y3 . . . .    pieces of 4 pairs (x, y), rotary_dim / 2 apart
//   interleaved  x0 y0 x1 y1 x2 y2 x3 y3 . . . . . . . .    adjacent pieces of 2 pairs each
//   the rest     channels from rotary_dim on are copied, two pieces per unit
//
// A thread has the same unit of up to four heads of a token. The thread that rotates a pair thus loads both of its
// channels, x is read once, out is written once, and a thread reads its n cosines and sines once for all of its heads.
// Pieces are granules of 16 bytes if strides, head_dim, rotary_dim and addresses allow it, else n = 1.
//
// Roles: neighbouring threads have neighbouring units, then neighbouring heads, so that a warp accesses whole cache
// lines. Registers: eight granules, the cosines, the sines. Shared memory: none. Pipeline: none inside a thread; all
// loads of x are issued before that of the position, on which the loads of the tables depend. Bound: memory. See
// docs/kernels/rope.md.
#pragma once

#include "attn/rope.cuh"
#include "kernels/rope/rope/config.h"
#include "ptx/griddepcontrol.cuh"
#include "qflash_ops.h"

namespace qf {
namespace rope {

// How the work is distributed: units of a head, of which the first are rotated; groups of heads.
struct Deal {
  unsigned rotated, units, groups, count;
};

// A piece as stored in memory.
template <int kCount>
struct Piece {
  using Type = Word4;
};
template <>
struct Piece<1> {
  using Type = Element;
};

__device__ __forceinline__ void load_piece(Word4& raw, const Element* g) { raw = ld_no_allocate(g); }
__device__ __forceinline__ void load_piece(Element& raw, const Element* g) { raw = *g; }

// Attention soon reads the rotated values again: they stay in the caches.
__device__ __forceinline__ void store_piece(Element* g, const Word4& raw) { st_global(g, raw); }
__device__ __forceinline__ void store_piece(Element* g, const Element& raw) { *g = raw; }

template <int kCount>
__device__ __forceinline__ void to_floats(float* x, const typename Piece<kCount>::Type& raw) {
  if constexpr (kCount == 1) {
    x[0] = to_float(raw);
  } else {
    unpack(raw, *reinterpret_cast<float (*)[kCount]>(x), static_cast<const Element*>(nullptr));
  }
}

template <int kCount>
__device__ __forceinline__ void from_floats(const float* x, typename Piece<kCount>::Type& raw) {
  if constexpr (kCount == 1) {
    from_float(x[0], raw);
  } else {
    raw = pack_granule(*reinterpret_cast<const float (*)[kCount]>(x), static_cast<const Element*>(nullptr));
  }
}

// One thread's share: a unit of a token, of heads group, group + groups, ...
template <int kCount, bool kInterleaved>
struct Share {
  int b, t, group;
  int pair;      // the first of the unit; < 0: the unit is copied
  int first[2];  // first channels of its pieces; the second may be past the last channel

  __device__ __forceinline__ Share(const QfRopeParams& p, const Deal& deal, unsigned i) {
    const unsigned row = i / deal.units, unit = i - row * deal.units, token = row / deal.groups;
    group = int(row - token * deal.groups);
    b = int(token / p.length);
    t = int(token - unsigned(b) * p.length);
    const bool rotates = unit < deal.rotated;
    const int from = rotates ? 0 : p.rope.rotary_dim, index = int(rotates ? unit : unit - deal.rotated) * kCount;
    pair = rotates ? index : -1;
    first[0] = rotates && !kInterleaved ? index : from + 2 * index;
    first[1] = rotates && !kInterleaved ? index + p.rope.rotary_dim / 2 : first[0] + kCount;
  }
};

// Cosines and sines of kCount pairs of a token, with the sign of its position and of the direction; NaN outside the
// table.
template <int kCount>
struct Angles {
  float cosine[kCount], sine[kCount];

  __device__ __forceinline__ Angles(const QfRopeParams& p, int b, int t, int pair) {
    const Rotation rotation = rotation_at(p.rope, position_k(p.rope, b, 0, t));
    const float sign = p.inverse ? -rotation.sign : rotation.sign;
#pragma unroll
    for (int e = 0; e < kCount; ++e) cosine[e] = sine[e] = nan();
    if (rotation.row < 0) return;
    const int64_t at = int64_t(rotation.row) * (p.rope.rotary_dim / 2) + pair;
    if constexpr (kCount == 1) {
      cosine[0] = p.rope.cos[at], sine[0] = p.rope.sin[at];
    } else {
#pragma unroll
      for (int e = 0; e < kCount; e += 4) {
        unpack(ld_constant(p.rope.cos + at + e), *reinterpret_cast<float (*)[4]>(cosine + e), p.rope.cos);
        unpack(ld_constant(p.rope.sin + at + e), *reinterpret_cast<float (*)[4]>(sine + e), p.rope.sin);
      }
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) sine[e] *= sign;
  }

  // Rotates the pairs of two pieces, rounded as in rope4 (attn/rope.cuh): a product, then an FMA.
  template <bool kInterleaved>
  __device__ __forceinline__ void rotate(typename Piece<kCount>::Type (&raw)[2]) const {
    float x[2 * kCount];
    to_floats<kCount>(x, raw[0]), to_floats<kCount>(x + kCount, raw[1]);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      float& one = x[kInterleaved ? 2 * e : e];
      float& other = x[kInterleaved ? 2 * e + 1 : e + kCount];
      const float a = one, b = other;
      one = fmaf(b, -sine[e], a * cosine[e]);
      other = fmaf(a, sine[e], b * cosine[e]);
    }
    from_floats<kCount>(x, raw[0]), from_floats<kCount>(x + kCount, raw[1]);
  }
};

}  // namespace rope
}  // namespace qf

// kCount: pairs of a unit. p.rope.positions_k: of every token, or null.
template <int kCount, bool kInterleaved>
__global__ void __launch_bounds__(qf::rope::kThreads, qf::rope::kResidentBlocks)
    qf_rope_kernel(const __grid_constant__ QfRopeParams p, const qf::rope::Deal deal) {
  using namespace qf;
  using namespace qf::rope;
  wait_for_previous_grid();  // it wrote what is rotated
  const unsigned i = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  if (i >= deal.count) return;
  const Share<kCount, kInterleaved> share(p, deal, i);
  const Element* const g_x = static_cast<const Element*>(p.x.data) + share.b * p.x.stride_b + share.t * p.x.stride_t;
  Element* const g_out = static_cast<Element*>(p.out.data) + share.b * p.out.stride_b + share.t * p.out.stride_t;
  const auto for_each_piece = [&](auto visit) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int64_t h = share.group + int64_t(j) * deal.groups;
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
        if (h < p.heads && share.first[piece] < p.head_dim) visit(j, piece, h, share.first[piece]);
    }
  };

  typename Piece<kCount>::Type raw[kHeads][2] = {};
  for_each_piece([&](int j, int piece, int64_t h, int d) { load_piece(raw[j][piece], g_x + h * p.x.stride_h + d); });
  if (share.pair >= 0) {
    const Angles<kCount> angles(p, share.b, share.t, share.pair);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) angles.template rotate<kInterleaved>(raw[j]);
  }
  for_each_piece(
      [&](int j, int piece, int64_t h, int d) { store_piece(g_out + h * p.out.stride_h + d, raw[j][piece]); });
}
