// NaN and infinity in V, in tiles that some rows see only in part. A masked key has weight 0, and 0 times NaN would
// spoil the rows that must not see it. So such a tile is searched while its threads still wait for it; if something is
// found, it is set to zero in shared memory, and added by hand to the rows that do see it, once the product is done. A
// visible key's weight is never zero, so what it adds is its V itself.
#pragma once

#include "attn/mask.cuh"
#include "attn/mma/tile.cuh"

namespace qf {

// Exponent bits of both halves of a word.
template <class Element>
struct Exponent;
template <>
struct Exponent<F16> {
  static constexpr uint32_t kBits = 0x7c007c00u;
};
template <>
struct Exponent<BF16> {
  static constexpr uint32_t kBits = 0x7f807f80u;
};

template <class Element>
__device__ __forceinline__ bool word_nonfinite(uint32_t word) {
  const uint32_t zero_bits = ~word & Exponent<Element>::kBits;  // a half without any: NaN or infinity
  return ((zero_bits - 0x00010001u) & ~zero_bits & 0x80008000u) != 0;
}

// Does one of the chunks that this thread copied hold NaN or infinity? Needs no barrier, only its own copies done.
template <class Element, class Walk>
__device__ __forceinline__ bool own_chunks_nonfinite(const char* s_tile) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < Walk::kCopies; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(s_tile + Walk::offset(i));
    found |= word_nonfinite<Element>(x.x) | word_nonfinite<Element>(x.y) | word_nonfinite<Element>(x.z) |
             word_nonfinite<Element>(x.w);
  }
  return found;
}

// Zeros in their place, in the chunks that this thread copied.
template <class Element, class Walk>
__device__ inline void clear_nonfinite(char* s_tile) {
  for (int i = 0; i < Walk::kCopies; ++i) {
    uint16_t* const s_chunk = reinterpret_cast<uint16_t*>(s_tile + Walk::offset(i));
    for (int e = 0; e < kPerChunk; ++e)
      if (word_nonfinite<Element>(s_chunk[e])) s_chunk[e] = 0;
  }
}

// O += v of every key of the tile whose v is not finite, for the rows that see it. `mask` counts keys from key0;
// O[i][j][2 h + e] is row 2 i + h of the lane, channel 8 j + column + e.
template <class Element, int kMTiles, int kOTiles>
__device__ inline void add_nonfinite(float (&O)[kMTiles][kOTiles][4], const HeadRows<Element>& v, int key0, int keys,
                                     int column, const TileMask<8>& mask) {
#pragma unroll 1
  for (int key = 0; key < keys && key0 + key < v.length; ++key) {
    const Element* g_row = v.row(key0 + key);
#pragma unroll
    for (int j = 0; j < kOTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = 8 * j + column + e;
        const float x = d < v.head_dim ? to_float(g_row[d]) : 0.0f;
        if (x * 0.0f == 0.0f) continue;
#pragma unroll
        for (int r = 0; r < 2 * kMTiles; ++r)
          if (mask(r, key)) O[r / 2][j][r % 2 * 2 + e] += x;
      }
  }
}

}  // namespace qf
