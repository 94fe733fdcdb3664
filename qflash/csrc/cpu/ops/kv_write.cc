// qf_cpu_kv_write: everything is checked before anything is written; then tokens are stored on all threads.
#include "kv_write.h"

#include <algorithm>
#include <new>
#include <vector>

#include "checks.h"
#include "hadamard.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

using LongLong = long long;

constexpr int64_t kTaskTokens = 64;  // per task

// All new tokens of a sequence: none where its length is 0 and its batch has the same number for all; batches are
// padded with rows of no sequence in this way.
NewTokens tokens_of(const QfKvWriteParams& p, int64_t b) {
  NewTokens tokens{b, 0, 0, p.k_len, 0};
  if (p.cu_seqlens_k) {
    tokens.first_row = p.cu_seqlens_k[b];
    tokens.count = p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b];
  } else if (p.kv_lens[b] == 0) {
    tokens.count = 0;
  }
  tokens.place = p.kv_lens[b] - tokens.count;
  return tokens;
}

int check_shape(const QfKvWriteParams& p) {
  const QfKv& kv = p.kv;
  const bool integers = kv.kind == QF_KV_PAGES_INT8;
  if (!integers && kv.kind != QF_KV_PAGES)
    return fail(QF_UNSUPPORTED, "kv.kind is %d; allowed: %d or %d, pages", kv.kind, QF_KV_PAGES, QF_KV_PAGES_INT8);
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim || (integers && p.head_dim % kHadamard != 0))
    return fail(QF_UNSUPPORTED, "head_dim is %d; allowed: 1 to %d, with int8 pages multiples of %d", p.head_dim,
                kMaxHeadDim, kHadamard);
  // PyTorch's address of an array without elements is 0.
  const bool has_tables = p.batch == 0 || (p.kv_lens && (kv.page_table || p.columns == 0));
  if (kv.page_size < 1 || !has_tables)
    return fail(QF_UNSUPPORTED, "kv.page_size is %d; allowed: 1 or more, with kv.page_table and kv.lens", kv.page_size);
  const int32_t dtype = integers ? int32_t(QF_I8) : p.dtype;
  const bool has_scales = kv.pages == 0 || (kv.k_scales.scale && kv.v_scales.scale);
  if (kv.k_dtype != dtype || kv.v_dtype != dtype || (integers && !has_scales))
    return fail(QF_UNSUPPORTED, "kv.k_pages and kv.v_pages have dtypes %d and %d; allowed: %d, int8 with scales",
                kv.k_dtype, kv.v_dtype, dtype);
  if (p.rope.cos && (p.rope.rotary_dim < 0 || p.rope.rotary_dim > p.head_dim))
    return fail(QF_UNSUPPORTED, "rope.cos rotates %d channels; allowed: 0 to %d, head_dim", p.rope.rotary_dim,
                p.head_dim);
  return QF_OK;
}

int check_places(const QfKvWriteParams& p, const NewTokens& tokens) {
  const int64_t end = tokens.place + tokens.count, room = int64_t(p.columns) * p.kv.page_size;
  if (tokens.place < 0 || end > room)
    return fail(QF_BAD_VALUE,
                "kv.lens[%lld] is %lld; allowed: %lld, its new tokens, to %lld, what kv.page_table holds%s",
                LongLong(tokens.batch), LongLong(end), LongLong(tokens.count), LongLong(room),
                p.cu_seqlens_k ? "" : ", or 0, a row of padding");
  return check_page_table(p.kv, tokens.batch, {tokens.place, end});
}

int check_positions(const QfKvWriteParams& p, const NewTokens& tokens) {
  const int32_t* positions = p.rope.positions_k;
  // Without positions the first and the last token bound the rest.
  const int64_t step = positions ? 1 : std::max<int64_t>(tokens.count - 1, 1);
  for (int64_t t = 0; t < tokens.count; t += step) {
    const int64_t row = tokens.first_row + t;
    const int64_t position = positions ? positions[tokens.batch * p.rope.stride_positions_k_b + row] : tokens.place + t;
    const char* name = positions ? "rope.positions_k" : "the position of new token";
    if (int status = check_position(name, row, position, p.rope)) return status;
  }
  return QF_OK;
}

int check(const QfKvWriteParams& p) {
  if (p.struct_bytes != int32_t(sizeof p)) return QF_BAD_ABI;
  if (int status = check_shape(p)) return status;
  if (p.cu_seqlens_k)
    if (int status = check_cumulative("cu_seqlens", "k's length", p.cu_seqlens_k, p.batch, p.total_k, p.k_len))
      return status;
  for (int32_t b = 0; b < p.batch; b++) {
    const NewTokens tokens = tokens_of(p, b);
    if (tokens.count == 0) continue;
    if (int status = check_places(p, tokens)) return status;
    if (p.rope.cos)
      if (int status = check_positions(p, tokens)) return status;
  }
  return QF_OK;
}

int write(const QfKvWriteParams& p, Isa isa) {
  std::vector<NewTokens> tasks;
  for (int32_t b = 0; b < p.batch; b++) {
    const NewTokens all = tokens_of(p, b);
    for (int64_t first = 0; first < all.count; first += kTaskTokens) {
      tasks.push_back(all);
      tasks.back().first = first;
      tasks.back().count = std::min(kTaskTokens, all.count - first);
    }
  }
  auto one = [&, write = QF_PICK(isa, write_tokens)](int64_t task) {
    write(p, tasks[size_t(task)]);
    return int(QF_OK);
  };
  return parallel_for(int64_t(tasks.size()), p.num_threads, one);
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_kv_write(const QfKvWriteParams* params, void*) {
  if (int status = qf::check(*params)) return status;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  try {
    return qf::write(*params, isa);
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}
