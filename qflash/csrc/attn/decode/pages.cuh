// Where the keys of a sequence are in the pages of a cache.
#pragma once

#include "attn/mask.cuh"
#include "qflash.h"

namespace qf {
namespace decode {

struct Place {
  int page, token;  // a page outside 0 .. pages - 1 is not to be read
};

// One row of the page table.
struct PageRow {
  const int32_t* g_entries;
  int page_size, columns, pages;

  __device__ __forceinline__ PageRow(const QfAttnParams& p, int b)
      : g_entries(p.kv.page_table + b * p.kv.page_table_stride),
        page_size(p.kv.page_size),
        columns(p.k_len / page_size),
        pages(p.kv.pages) {}
  __device__ __forceinline__ Place place(int key) const {
    const int column = key / page_size;
    return {column < columns ? g_entries[column] : pages, key - column * page_size};
  }
  __device__ __forceinline__ bool in_pool(int page) const { return unsigned(page) < unsigned(pages); }
  // Collective for a warp: are the pages of all these keys in the pool?
  __device__ __forceinline__ bool all_in_pool(const KeyRange& keys) const {
    if (keys.begin >= keys.end) return true;
    const int last = (keys.end - 1) / page_size;
    bool good = true;
    for (int column = keys.begin / page_size + int(threadIdx.x % 32); column <= last; column += 32)
      good = good && in_pool(g_entries[column]);
    return __all_sync(0xffffffffu, good);
  }
};

}  // namespace decode
}  // namespace qf
