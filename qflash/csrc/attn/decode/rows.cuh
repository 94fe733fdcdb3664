// Where the keys and values of a sequence lie: at its place of the batch, or in the pages of a cache.
#pragma once

#include "qflash.h"

namespace qf {
namespace decode {

// A token of K and V. outer: its sequence, or its page; -1: the page table has no page of the pool for it.
struct TokenPlace {
  int outer, token;

  __device__ __forceinline__ bool exists() const { return outer >= 0; }
  __device__ __forceinline__ TokenPlace later(int tokens) const { return {outer, token + tokens}; }
  template <class Element>
  __device__ __forceinline__ const Element* row(const QfTensor& x, int head) const {
    return static_cast<const Element*>(x.data) + outer * x.stride_b + token * x.stride_t + head * x.stride_h;
  }
};

// Of a key that some row sees: other entries of the page table are not looked at.
template <bool kPages>
__device__ __forceinline__ TokenPlace place_of(const QfKv& kv, int b, int key) {
  if constexpr (!kPages) {
    return {b, key};
  } else {
    const int column = key / kv.page_size, page = kv.page_table[b * kv.page_table_stride + column];
    return {page >= 0 && page < kv.pages ? page : -1, key - column * kv.page_size};
  }
}

}  // namespace decode
}  // namespace qf
