// qf_cpu_int8: cuts the passes over keys and rows into tasks and passes these to this machine's kernel. See int8.h.
// Arrays that are INT8 already go to ops/int8_quantized.cc.
#include "int8.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "checks.h"
#include "isa.h"
#include "ops/int8_quantized.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

// Few rows over many keys, as in decoding, are split over the keys. The split depends on the problem alone, never on
// the threads, so that the same call always gives the same bits; with batch_invariant on the sequence alone.
constexpr int64_t kEnoughTasks = 64;
constexpr int64_t kLeastShare = 1024;  // keys
static_assert(kLeastShare % kInt8KeyBlock == 0, "shares start where blocks do");

constexpr int64_t kChunksPerTask = 16;

// One sequence: its shape and where its tasks and its memory begin. Tasks and heads are counted over all sequences.
struct SequenceLayout {
  Sequence sequence;
  KeyRange keys;       // keys that some row sees: what must be packed
  int64_t first_head;  // times kv_heads: heads of all sequences before
  int64_t padded_keys, blocks, chunks;
  int64_t rows, row_blocks, shares, share_keys;
  int64_t first_sum_task, first_pack_task, first_attend_task, first_merge_task;
  int64_t first_key, first_block, first_chunk, first_partial;
};

// A task of a pass, located: sequence, key head, and what is left of the index.
struct Task {
  const SequenceLayout* layout;
  int64_t kv_head, index;
};

class Call {
 public:
  Call(const QfAttnParams& p, const Int8Kernel& kernel) : p_(p), kernel_(kernel) {}

  int run() {
    lay_out();
    if (attend_tasks_ == 0) return QF_OK;
    if (!allocate()) return QF_NO_MEMORY;
    if (int status = pass(sum_tasks_, &Call::sum_task)) return status;
    if (int status = pass(int64_t(layouts_.size()) * p_.kv_heads, &Call::mean_task)) return status;
    if (int status = pass(pack_tasks_, &Call::pack_task)) return status;
    if (int status = pass(attend_tasks_, &Call::attend_task)) return status;
    return pass(merge_tasks_, &Call::merge_task);
  }

 private:
  void lay_out() {
    int64_t row_block_tasks = 0;
    for (int32_t b = 0; b < p_.batch; b++) {
      const Sequence s = sequence_of(p_, b);
      row_block_tasks += ceil_div(rows_of(s), kernel_.row_block) * p_.kv_heads;
    }
    for (int32_t b = 0; b < p_.batch; b++) {
      SequenceLayout layout{};
      layout.sequence = sequence_of(p_, b);
      if (layout.sequence.len_q == 0) continue;
      add(layout, row_block_tasks);
    }
  }

  void add(SequenceLayout& layout, int64_t row_block_tasks) {
    const Sequence& s = layout.sequence;
    const int64_t heads = p_.kv_heads;
    layout.keys = keys_of_any(p_, s, 0, s.len_q - 1);
    layout.first_head = int64_t(layouts_.size()) * heads;
    layout.padded_keys = round_up(s.len_k, kInt8KeyBlock);
    layout.blocks = layout.padded_keys / kInt8KeyBlock;
    layout.chunks = ceil_div(s.len_k, kInt8MeanChunk);
    layout.rows = rows_of(s);
    layout.row_blocks = ceil_div(layout.rows, kernel_.row_block);
    const int64_t beside = p_.batch_invariant ? layout.row_blocks * heads : row_block_tasks;
    const int64_t wanted = ceil_div(kEnoughTasks, beside);
    const int64_t visible = std::max<int64_t>(layout.keys.end - layout.keys.begin, 1);
    layout.share_keys = std::max(kLeastShare, round_up(ceil_div(visible, wanted), kInt8KeyBlock));
    layout.shares = ceil_div(visible, layout.share_keys);
    layout.first_key = keys_, layout.first_block = blocks_, layout.first_chunk = chunks_;
    layout.first_sum_task = sum_tasks_, layout.first_pack_task = pack_tasks_;
    layout.first_attend_task = attend_tasks_, layout.first_merge_task = merge_tasks_,
    layout.first_partial = partial_count_;
    keys_ += layout.padded_keys * heads;
    blocks_ += layout.blocks * heads;
    chunks_ += layout.chunks * heads;
    sum_tasks_ += sum_tasks_of(layout) * heads;
    pack_tasks_ += layout.blocks * heads;
    attend_tasks_ += layout.row_blocks * layout.shares * heads;
    if (layout.shares > 1) {
      merge_tasks_ += layout.row_blocks * heads;
      partial_count_ += layout.row_blocks * layout.shares * heads;
    }
    layouts_.push_back(layout);
  }

  int64_t rows_of(const Sequence& s) const { return s.len_q * (p_.q_heads / p_.kv_heads); }
  static int64_t sum_tasks_of(const SequenceLayout& layout) { return ceil_div(layout.chunks, kChunksPerTask); }

  // Assigns the arena's pieces; without an arena only counts their bytes.
  template <class T>
  void place(T*& pointer, int64_t count) {
    pointer = arena_ ? reinterpret_cast<T*>(arena_.get() + placed_) : nullptr;
    placed_ += size_t(round_up(count * int64_t(sizeof(T)), 64));
  }

  void place_all() {
    placed_ = 0;
    place(keys_data_, keys_ / kInt8Panel * kernel_.panel_bytes(p_.head_dim));
    place(values_data_, keys_ * kernel_.value_bytes(p_.head_dim));
    place(key_scales_, keys_);
    place(means_, int64_t(layouts_.size()) * p_.kv_heads * kMaxHeadDim);
    place(nonfinite_, blocks_);
    place(chunk_sums_, chunks_ * p_.head_dim);
    place(chunk_finite_, chunks_);
    place(partial_data_, partial_count_ * partial_floats());
  }

  bool allocate() {
    place_all();
    arena_.reset(static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(placed_, 64))));
    if (!arena_) return false;
    place_all();
    for (int64_t i = 0; i < partial_count_; i++) {
      float* data = partial_data_ + i * partial_floats();
      partials_.push_back({data + 2 * kernel_.row_block, data, data + kernel_.row_block});
    }
    return true;
  }

  int pass(int64_t tasks, int (Call::*task)(int64_t)) {
    if (tasks == 0) return QF_OK;
    auto run_task = [this, task](int64_t i) { return (this->*task)(i); };
    return parallel_for(tasks, p_.num_threads, run_task);
  }

  // The layout whose tasks, `per_head` of them for each key head from `first` on, include `task`.
  template <class PerHead>
  Task find(int64_t task, int64_t SequenceLayout::* first, PerHead per_head) const {
    auto above = std::upper_bound(layouts_.begin(), layouts_.end(), task,
                                  [first](int64_t i, const SequenceLayout& layout) { return i < layout.*first; });
    const SequenceLayout& layout = *(above - 1);
    const int64_t local = task - layout.*first, count = per_head(layout);
    return {&layout, local / count, local % count};
  }

  Int8Head head_of(const SequenceLayout& layout, int64_t kv_head) const {
    const int64_t key = layout.first_key + kv_head * layout.padded_keys;
    return {kv_head,
            keys_data_ + key / kInt8Panel * kernel_.panel_bytes(p_.head_dim),
            values_data_ + key * kernel_.value_bytes(p_.head_dim),
            key_scales_ + key,
            means_ + (layout.first_head + kv_head) * kMaxHeadDim,
            nonfinite_ + layout.first_block + kv_head * layout.blocks};
  }

  int sum_task(int64_t i) {
    const Task task = find(i, &SequenceLayout::first_sum_task, sum_tasks_of);
    const SequenceLayout& layout = *task.layout;
    const int64_t base = layout.first_chunk + task.kv_head * layout.chunks, first = task.index * kChunksPerTask;
    for (int64_t c = first; c < std::min(first + kChunksPerTask, layout.chunks); c++)
      chunk_finite_[base + c] = kernel_.sum_keys(p_, layout.sequence, task.kv_head, c * kInt8MeanChunk,
                                                 std::min((c + 1) * kInt8MeanChunk, layout.sequence.len_k),
                                                 chunk_sums_ + (base + c) * p_.head_dim);
    return QF_OK;
  }

  int mean_task(int64_t i) {
    const SequenceLayout& layout = layouts_[size_t(i / p_.kv_heads)];
    const int64_t base = layout.first_chunk + i % p_.kv_heads * layout.chunks;
    double total[kMaxHeadDim] = {};
    int64_t finite = 0;
    for (int64_t c = base; c < base + layout.chunks; c++) {
      finite += chunk_finite_[c];
      for (int d = 0; d < p_.head_dim; d++) total[d] += double(chunk_sums_[c * p_.head_dim + d]);
    }
    for (int d = 0; d < kMaxHeadDim; d++) {
      const float mean = float(total[d] / double(std::max<int64_t>(finite, 1)));
      means_[i * kMaxHeadDim + d] = std::isfinite(mean) ? mean : 0.0f;
    }
    return QF_OK;
  }

  int pack_task(int64_t i) {
    const Task task =
        find(i, &SequenceLayout::first_pack_task, [](const SequenceLayout& layout) { return layout.blocks; });
    const SequenceLayout& layout = *task.layout;
    const int64_t first = task.index * kInt8KeyBlock;
    if (first < layout.keys.end && first + kInt8KeyBlock > layout.keys.begin)
      kernel_.pack_block(p_, layout.sequence, head_of(layout, task.kv_head), task.index);
    return QF_OK;
  }

  // Rows of row block `index`, counted from the end: with a causal mask the long ones are there and must start first.
  struct Rows {
    int64_t first;
    int count;
  };
  Rows rows_of(const SequenceLayout& layout, int64_t index) const {
    const int64_t first = (layout.row_blocks - 1 - index) * kernel_.row_block;
    return {first, int(std::min<int64_t>(kernel_.row_block, layout.rows - first))};
  }

  int64_t partial_floats() const { return int64_t(kernel_.row_block) * (kernel_.value_width(p_.head_dim) + 2); }
  int64_t partial_index(const SequenceLayout& layout, int64_t kv_head, int64_t row_block) const {
    return layout.first_partial + (kv_head * layout.row_blocks + row_block) * layout.shares;
  }

  int attend_task(int64_t i) {
    const Task task = find(i, &SequenceLayout::first_attend_task,
                           [](const SequenceLayout& layout) { return layout.row_blocks * layout.shares; });
    const SequenceLayout& layout = *task.layout;
    const int64_t row_block = task.index / layout.shares, share = task.index % layout.shares;
    const Rows rows = rows_of(layout, row_block);
    const Int8Head head = head_of(layout, task.kv_head);
    if (layout.shares == 1)
      return kernel_.attend(p_, layout.sequence, head, rows.first, rows.count, {0, layout.sequence.len_k}, nullptr);
    const int64_t begin = layout.keys.begin / kInt8KeyBlock * kInt8KeyBlock + share * layout.share_keys;
    const int64_t end = share + 1 == layout.shares ? layout.sequence.len_k : begin + layout.share_keys;
    return kernel_.attend(p_, layout.sequence, head, rows.first, rows.count, {begin, end},
                          &partials_[size_t(partial_index(layout, task.kv_head, row_block) + share)]);
  }

  int merge_task(int64_t i) {
    // Sequences without shares have no merge tasks, so several layouts may start at `i`: find() takes the last, which
    // is the one that owns the task.
    const Task task =
        find(i, &SequenceLayout::first_merge_task, [](const SequenceLayout& layout) { return layout.row_blocks; });
    const SequenceLayout& layout = *task.layout;
    const Rows rows = rows_of(layout, task.index);
    return kernel_.merge(p_, layout.sequence, head_of(layout, task.kv_head), rows.first, rows.count,
                         &partials_[size_t(partial_index(layout, task.kv_head, task.index))], layout.shares);
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  const QfAttnParams& p_;
  const Int8Kernel& kernel_;
  std::vector<SequenceLayout> layouts_;
  std::vector<Int8Partial> partials_;
  int64_t keys_ = 0, blocks_ = 0, chunks_ = 0, partial_count_ = 0;
  int64_t sum_tasks_ = 0, pack_tasks_ = 0, attend_tasks_ = 0, merge_tasks_ = 0;
  std::unique_ptr<char, Free> arena_;
  size_t placed_ = 0;
  char *keys_data_ = nullptr, *values_data_ = nullptr;
  float *key_scales_ = nullptr, *means_ = nullptr, *chunk_sums_ = nullptr, *partial_data_ = nullptr;
  uint8_t* nonfinite_ = nullptr;
  int32_t* chunk_finite_ = nullptr;
};

const Int8Kernel& kernel_for(Isa isa) {
#if defined(__x86_64__)
  if (has_amx()) return amx::int8_kernel;
  if (isa == Isa::kAvx512 && has_avx512_vnni()) return avx512::int8_kernel;
  if (isa != Isa::kGeneric) return avx2::int8_kernel;
#else
  (void)isa;
#endif
  return generic::int8_kernel;
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_int8(const QfAttnParams* params, void*) {
  if (params->struct_bytes != int32_t(sizeof *params)) return QF_BAD_ABI;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  try {
    if (params->kv.kind == QF_KV_QUANTIZED) return qf::attend_quantized(*params, isa);
    if (int status = qf::check_values(*params)) return status;
    return qf::Call(*params, qf::kernel_for(isa)).run();
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}
