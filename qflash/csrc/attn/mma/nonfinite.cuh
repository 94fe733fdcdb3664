// NaN and infinity in V, in tiles that some rows see only in part. A masked key has weight 0, and 0 times NaN would
// spoil the rows that must not see it. So such a tile is searched while its threads still wait for it; nonfinite values
// are set to zero in shared memory and, after the product, added separately to the rows that do see them. A visible
// key's weight is never zero, so it contributes its V itself.
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

// Does one of the chunks that this thread copied hold NaN or infinity? Needs no barrier, only that its own copies are
// done. kAtOnce: how many of them are held in registers.
template <class Element, class Walk, int kAtOnce = Walk::kCopies>
__device__ __forceinline__ bool own_chunks_nonfinite(const char* s_tile) {
  bool found = false;
#pragma unroll kAtOnce
  for (int i = 0; i < Walk::kCopies; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(s_tile + Walk::offset(i));
    found |= word_nonfinite<Element>(x.x) | word_nonfinite<Element>(x.y) | word_nonfinite<Element>(x.z) |
             word_nonfinite<Element>(x.w);
  }
  return found;
}

// Replaces them by zeros in the chunks that this thread copied.
template <class Element, class Walk>
__device__ inline void clear_nonfinite(char* s_tile) {
  for (int i = 0; i < Walk::kCopies; ++i) {
    uint16_t* const s_chunk = reinterpret_cast<uint16_t*>(s_tile + Walk::offset(i));
    for (int e = 0; e < kPerChunk; ++e)
      if (word_nonfinite<Element>(s_chunk[e])) s_chunk[e] = 0;
  }
}

// Adds to the finished rows of a warp every nonfinite v of the keys key0 .. key0 + keys - 1 that they see. row0: the
// first row in its sequence; at(row, d): where a row's output is; v(key, d): V, as a float.
template <class At, class V>
__device__ inline void add_nonfinite_at(At at, int row0, int rows, int head_dim, int key0, int keys, const Mask& mask,
                                        int lane, V v) {
  for (int key = key0; key < min(key0 + keys, mask.len_k); ++key) {
    for (int d = lane; d < head_dim; d += 32) {
      const float x = v(key, d);
      if (x * 0.0f == 0.0f) continue;
      for (int row = 0; row < rows; ++row) {
        const KeyRange seen = mask.visible(row0 + row);
        if (key < seen.begin || key >= seen.end) continue;
        auto& o = at(row, d);
        from_float(to_float(o) + x, o);
      }
    }
  }
}

// The same for rows in shared memory, kChunks chunks per row, swizzled.
template <int kChunks, class Element, class V>
__device__ inline void add_nonfinite(char* s_rows, int row0, int rows, int head_dim, int key0, int keys,
                                     const Mask& mask, int lane, V v) {
  const auto at = [&](int row, int d) -> Element& {
    const int offset = Swizzle<kChunks>::offset(row, d / kPerChunk) + d % kPerChunk * int(sizeof(Element));
    return *reinterpret_cast<Element*>(s_rows + offset);
  };
  add_nonfinite_at(at, row0, rows, head_dim, key0, keys, mask, lane, v);
}

}  // namespace qf
