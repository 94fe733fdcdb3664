// How pages of K and V are passed to TMA. Host side.
#pragma once

#include "attn/kv.h"
#include "attn/page_gather.cuh"
#include "attn/wgmma/relayout.cuh"

namespace qf {
namespace sm90_fwd {

// Can TMA load boxes of the pool in place? addressed: addresses are known, too.
inline bool pool_maps(const QfAttnParams& p, const QfTensor& pool, bool addressed) {
  if (addressed && reinterpret_cast<uintptr_t>(pool.data) % 16 != 0) return false;
  return strides_map(wgmma::extents_of(pool, p.head_dim, p.kv.page_size, p.kv_heads, p.kv.pages), 2);
}

inline bool serves_pages(const QfAttnParams& p) {
  return (kv_is_int8_pages(p) || kv_is_pages(p)) && pages_walk(p) && GatheredPages(p).fit();
}

// Are the pages copied by a gather pass?
inline bool gathers(const QfAttnParams& p, bool addressed) {
  return p.kv.kind == QF_KV_PAGES_INT8 || !pool_maps(p, p.kv.k, addressed) || !pool_maps(p, p.kv.v, addressed);
}

}  // namespace sm90_fwd
}  // namespace qf
