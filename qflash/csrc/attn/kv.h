// What a launch asks of a QfKv before it reads any of it.
#pragma once

#include "qflash.h"

namespace qf {

// K and V are two arrays with elements of the problem's own type.
inline bool kv_is_arrays(const QfAttnParams& p) {
  return p.kv.kind == QF_KV_ARRAYS && p.kv.page_size == 0 && p.kv.k_dtype == p.dtype && p.kv.v_dtype == p.dtype;
}

// K and V are in pages, with elements of the problem's own type.
inline bool kv_is_pages(const QfAttnParams& p) {
  return p.kv.kind == QF_KV_PAGES && p.kv.page_size > 0 && p.kv.page_table && p.kv_lens && p.kv.k_dtype == p.dtype &&
         p.kv.v_dtype == p.dtype;
}

}  // namespace qf
