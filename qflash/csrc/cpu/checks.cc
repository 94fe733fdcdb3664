#include "checks.h"

#include "hadamard.h"
#include "sequence.h"
#include "sizes.h"
#include "status.h"

namespace qf {
namespace {

using LongLong = long long;

// Front ends reject these first, but a stored program bypasses them, and buffers and divisions rely on these checks.
int check_shape(const QfAttnParams& p) {
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim)
    return fail(QF_UNSUPPORTED, "head_dim is %d; allowed: 1 to %d", p.head_dim, kMaxHeadDim);
  if (p.kv_heads < 1 || p.q_heads < 1 || p.q_heads % p.kv_heads != 0)
    return fail(QF_UNSUPPORTED, "q has %d heads and k has %d; allowed: a multiple of k's, 1 or more", p.q_heads,
                p.kv_heads);
  if (p.rope.cos && (p.rope.rotary_dim < 0 || p.rope.rotary_dim > p.head_dim))
    return fail(QF_UNSUPPORTED, "rope.cos rotates %d channels; allowed: 0 to %d, head_dim", p.rope.rotary_dim,
                p.head_dim);
  return QF_OK;
}

int check_arrays(const QfAttnParams& p) {
  if (p.kv.kind != QF_KV_ARRAYS || p.kv.page_size != 0)
    return fail(QF_UNSUPPORTED, "kv.kind is %d with pages of %d; allowed: %d, two arrays, without pages", p.kv.kind,
                p.kv.page_size, QF_KV_ARRAYS);
  if (p.kv.k_dtype != p.dtype || p.kv.v_dtype != p.dtype)
    return fail(QF_UNSUPPORTED, "k and v have dtypes %d and %d; allowed: q's, %d", p.kv.k_dtype, p.kv.v_dtype, p.dtype);
  return QF_OK;
}

int check_pages(const QfAttnParams& p) {
  const QfKv& kv = p.kv;
  // PyTorch's address of an array without elements is 0.
  const bool has_tables = p.batch == 0 || (p.kv_lens && (kv.page_table || p.k_len == 0));
  if (kv.page_size < 1 || kv.pages < 0 || !has_tables || p.cu_seqlens_k)
    return fail(
        QF_UNSUPPORTED,
        "%d pages of %d tokens; allowed: pages of 1 or more, with kv.page_table and kv.lens, without cu_seqlens_k",
        kv.pages, kv.page_size);
  const bool integers = kv.kind == QF_KV_PAGES_INT8;
  const int32_t dtype = integers ? int32_t(QF_I8) : p.dtype;
  const bool has_scales = kv.pages == 0 || (kv.k_scales.scale && kv.v_scales.scale);
  if (kv.k_dtype != dtype || kv.v_dtype != dtype || (integers && !has_scales))
    return fail(QF_UNSUPPORTED, "kv.k_pages and kv.v_pages have dtypes %d and %d; allowed: %d, int8 with scales",
                kv.k_dtype, kv.v_dtype, dtype);
  if (integers && p.head_dim % kHadamard != 0)
    return fail(QF_UNSUPPORTED, "head_dim is %d; allowed with int8 pages: multiples of %d", p.head_dim, kHadamard);
  return QF_OK;
}

// Explicit positions of the rows that exist; without them, the first and the last row of each sequence bound the rest.
// With no key there is nothing to rotate a query against, and its implied position (down to -len_q) is never used.
int check_positions(const QfAttnParams& p, const Sequence& s) {
  const QfRope& rope = p.rope;
  const int64_t step_q = rope.positions_q ? 1 : s.len_q - 1, step_k = rope.positions_k ? 1 : s.len_k - 1;
  const char* name_q = rope.positions_q ? "rope.positions_q" : "the position of query";
  const char* name_k = rope.positions_k ? "rope.positions_k" : "the position of key";
  const int64_t checked_q = s.len_k == 0 && !rope.positions_q ? 0 : s.len_q;
  for (int64_t i = 0; i < checked_q; i += step_q > 0 ? step_q : 1)
    if (int status = check_position(name_q, s.first_q + i, query_position(p, s, i), rope)) return status;
  const int64_t checked_k = rotates_keys(p) ? s.len_k : 0;
  for (int64_t j = 0; j < checked_k; j += step_k > 0 ? step_k : 1)
    if (int status = check_position(name_k, s.first_k + j, key_position(p, s, j), rope)) return status;
  return QF_OK;
}

}  // namespace

int check_cumulative(const char* name, const char* longest_name, const int32_t* cu, int32_t batch, int64_t total,
                     int64_t longest) {
  if (cu[0] != 0) return fail(QF_BAD_VALUE, "%s[0] is %d; allowed: 0", name, cu[0]);
  for (int32_t b = 0; b < batch; b++) {
    if (cu[b + 1] < cu[b])
      return fail(QF_BAD_VALUE, "%s[%d] is %d; allowed: %d or more, what %s[%d] is", name, b + 1, cu[b + 1], cu[b],
                  name, b);
    if (cu[b + 1] - cu[b] > longest)
      return fail(QF_BAD_VALUE, "%s[%d] - %s[%d] is %d; allowed: 0 to %lld, %s", name, b + 1, name, b,
                  cu[b + 1] - cu[b], LongLong(longest), longest_name);
  }
  if (cu[batch] != total)
    return fail(QF_BAD_VALUE, "%s[%d] is %d; allowed: %lld, the number of rows", name, batch, cu[batch],
                LongLong(total));
  return QF_OK;
}

int check_position(const char* name, int64_t index, int64_t position, const QfRope& rope) {
  if (position > -int64_t(rope.rows) && position < rope.rows) return QF_OK;
  return fail(QF_BAD_VALUE, "%s[%lld] is %lld; allowed: %d to %d, the rows of rope.cos", name, LongLong(index),
              LongLong(position), 1 - rope.rows, rope.rows - 1);
}

int check_page_table(const QfKv& kv, int64_t batch, KeyRange needed) {
  if (needed.begin >= needed.end) return QF_OK;
  const int32_t* table = kv.page_table + batch * kv.page_table_stride;
  for (int64_t column = needed.begin / kv.page_size; column * kv.page_size < needed.end; column++)
    if (table[column] < 0 || table[column] >= kv.pages)
      return fail(QF_BAD_VALUE, "kv.page_table[%lld, %lld] is %d, where token %lld is; allowed: 0 to %d, the pages",
                  LongLong(batch), LongLong(column), table[column],
                  LongLong(column * kv.page_size > needed.begin ? column * kv.page_size : needed.begin), kv.pages - 1);
  return QF_OK;
}

int check_values(const QfAttnParams& p, bool pages) {
  if (p.struct_bytes != int32_t(sizeof(QfAttnParams))) return QF_BAD_ABI;
  if (int status = check_shape(p)) return status;
  const bool paged = pages && (p.kv.kind == QF_KV_PAGES || p.kv.kind == QF_KV_PAGES_INT8);
  if (int status = paged ? check_pages(p) : check_arrays(p)) return status;
  if (p.cu_seqlens_q)
    if (int status = check_cumulative("cu_seqlens_q", "max_seqlen_q", p.cu_seqlens_q, p.batch, p.total_q, p.q_len))
      return status;
  if (p.cu_seqlens_k)
    if (int status = check_cumulative("cu_seqlens_k", "max_seqlen_k", p.cu_seqlens_k, p.batch, p.total_k, p.k_len))
      return status;
  for (int32_t b = 0; b < p.batch; b++) {
    if (p.kv_lens) {
      const int32_t most = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.k_len;
      if (p.kv_lens[b] < 0 || p.kv_lens[b] > most)
        return fail(QF_BAD_VALUE, "%s[%d] is %d; allowed: 0 to %d", paged ? "kv.lens" : "kv_lens", b, p.kv_lens[b],
                    most);
    }
    if (paged)
      if (int status = check_page_table(p.kv, b, needed_keys(p, sequence_of(p, b)))) return status;
    if (p.rope.cos)
      if (int status = check_positions(p, sequence_of(p, b))) return status;
  }
  return QF_OK;
}

}  // namespace qf
