// What a launch requires of a QfKv before it reads any of it.
#pragma once

#include "qflash.h"

namespace qf {

// K and V are two arrays with elements of the problem's own type.
inline bool kv_is_arrays(const QfAttnParams& p) {
  return p.kv.kind == QF_KV_ARRAYS && p.kv.page_size == 0 && p.kv.k_dtype == p.dtype && p.kv.v_dtype == p.dtype;
}

// Pages, and the arrays that locate those of a sequence. An array without elements has no address in PyTorch.
inline bool finds_pages(const QfAttnParams& p) {
  return p.kv.page_size > 0 && (p.batch == 0 || (p.kv_lens && (p.kv.page_table || p.k_len == 0)));
}

// K and V are in pages, with elements of the problem's own type.
inline bool kv_is_pages(const QfAttnParams& p) {
  return p.kv.kind == QF_KV_PAGES && finds_pages(p) && p.kv.k_dtype == p.dtype && p.kv.v_dtype == p.dtype;
}

// K and V are in pages of int8, with all that dequantizing them takes.
inline bool kv_is_int8_pages(const QfAttnParams& p) {
  for (const QfScales* x : {&p.kv.k_scales, &p.kv.v_scales})
    if ((!x->scale && p.kv.pages > 0) || x->group != 1) return false;
  return p.kv.kind == QF_KV_PAGES_INT8 && finds_pages(p) && p.kv.k_dtype == QF_I8 && p.kv.v_dtype == QF_I8 &&
         p.head_dim % 16 == 0;
}

// Their scales can be copied in runs of 16 bytes.
inline bool scales_copy_in_runs(const QfAttnParams& p) {
  for (const QfScales* x : {&p.kv.k_scales, &p.kv.v_scales})
    if (reinterpret_cast<uintptr_t>(x->scale) % 16 != 0 || x->stride_b % 4 != 0 || x->stride_h % 4 != 0) return false;
  return true;
}

}  // namespace qf
