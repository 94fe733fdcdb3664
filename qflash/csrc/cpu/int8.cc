// qf_cpu_int8: plans the passes over keys and rows and hands their items to the kernel of this machine. See int8.h.
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

// Few rows over many keys, as in decoding, are split over the keys. How depends on the problem alone, never on the
// threads, so that the same call always gives the same bits.
constexpr int64_t kEnoughItems = 64;
constexpr int64_t kLeastShare = 1024;  // keys
static_assert(kLeastShare % kInt8KeyBlock == 0, "shares start where blocks do");

constexpr int64_t kChunksPerItem = 16;

// One sequence: its shape and where its items and its memory begin. Items and heads are counted over all sequences.
struct Plan {
  Sequence sequence;
  KeyRange keys;       // keys that some row sees: what must be packed
  int64_t first_head;  // times kv_heads: heads of all sequences before
  int64_t padded_keys, blocks, chunks;
  int64_t rows, row_blocks, shares, share_keys;
  int64_t first_sum_item, first_pack_item, first_attend_item, first_merge_item;
  int64_t first_key, first_block, first_chunk, first_partial;
};

// An item of a pass found again: sequence, key head, and what is left.
struct Item {
  const Plan* plan;
  int64_t kv_head, index;
};

class Call {
 public:
  Call(const QfAttnParams& p, const Int8Kernel& kernel) : p_(p), kernel_(kernel) {}

  int run() {
    lay_out();
    if (attend_items_ == 0) return QF_OK;
    if (!allocate()) return QF_NO_MEMORY;
    if (int status = pass(sum_items_, &Call::sum_item)) return status;
    if (int status = pass(int64_t(plans_.size()) * p_.kv_heads, &Call::mean_item)) return status;
    if (int status = pass(pack_items_, &Call::pack_item)) return status;
    if (int status = pass(attend_items_, &Call::attend_item)) return status;
    return pass(merge_items_, &Call::merge_item);
  }

 private:
  void lay_out() {
    int64_t row_block_items = 0;
    for (int32_t b = 0; b < p_.batch; b++) {
      const Sequence s = sequence_of(p_, b);
      row_block_items += ceil_div(rows_of(s), kernel_.row_block) * p_.kv_heads;
    }
    for (int32_t b = 0; b < p_.batch; b++) {
      Plan plan{};
      plan.sequence = sequence_of(p_, b);
      if (plan.sequence.len_q == 0) continue;
      add(plan, row_block_items);
    }
  }

  void add(Plan& plan, int64_t row_block_items) {
    const Sequence& s = plan.sequence;
    const int64_t heads = p_.kv_heads;
    plan.keys = keys_of_any(p_, s, 0, s.len_q - 1);
    plan.first_head = int64_t(plans_.size()) * heads;
    plan.padded_keys = round_up(s.len_k, kInt8KeyBlock);
    plan.blocks = plan.padded_keys / kInt8KeyBlock;
    plan.chunks = ceil_div(s.len_k, kInt8MeanChunk);
    plan.rows = rows_of(s);
    plan.row_blocks = ceil_div(plan.rows, kernel_.row_block);
    const int64_t wanted = ceil_div(kEnoughItems, row_block_items);
    const int64_t visible = std::max<int64_t>(plan.keys.end - plan.keys.begin, 1);
    plan.share_keys = std::max(kLeastShare, round_up(ceil_div(visible, wanted), kInt8KeyBlock));
    plan.shares = ceil_div(visible, plan.share_keys);
    plan.first_key = keys_, plan.first_block = blocks_, plan.first_chunk = chunks_;
    plan.first_sum_item = sum_items_, plan.first_pack_item = pack_items_;
    plan.first_attend_item = attend_items_, plan.first_merge_item = merge_items_, plan.first_partial = partial_count_;
    keys_ += plan.padded_keys * heads;
    blocks_ += plan.blocks * heads;
    chunks_ += plan.chunks * heads;
    sum_items_ += sum_items_of(plan) * heads;
    pack_items_ += plan.blocks * heads;
    attend_items_ += plan.row_blocks * plan.shares * heads;
    if (plan.shares > 1) {
      merge_items_ += plan.row_blocks * heads;
      partial_count_ += plan.row_blocks * plan.shares * heads;
    }
    plans_.push_back(plan);
  }

  int64_t rows_of(const Sequence& s) const { return s.len_q * (p_.q_heads / p_.kv_heads); }
  static int64_t sum_items_of(const Plan& plan) { return ceil_div(plan.chunks, kChunksPerItem); }

  // Hands out the arena's pieces, or with no arena yet only counts their bytes.
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
    place(means_, int64_t(plans_.size()) * p_.kv_heads * kMaxHeadDim);
    place(wild_, blocks_);
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

  int pass(int64_t items, int (Call::*item)(int64_t)) {
    if (items == 0) return QF_OK;
    auto run_item = [this, item](int64_t i) { return (this->*item)(i); };
    return parallel_for(items, p_.num_threads, run_item);
  }

  // The plan whose items, `per_head` of them for each key head from `first` on, include `item`.
  template <class PerHead>
  Item find(int64_t item, int64_t Plan::* first, PerHead per_head) const {
    auto above = std::upper_bound(plans_.begin(), plans_.end(), item,
                                  [first](int64_t i, const Plan& plan) { return i < plan.*first; });
    const Plan& plan = *(above - 1);
    const int64_t local = item - plan.*first, count = per_head(plan);
    return {&plan, local / count, local % count};
  }

  Int8Head head_of(const Plan& plan, int64_t kv_head) const {
    const int64_t key = plan.first_key + kv_head * plan.padded_keys;
    return {kv_head,
            keys_data_ + key / kInt8Panel * kernel_.panel_bytes(p_.head_dim),
            values_data_ + key * kernel_.value_bytes(p_.head_dim),
            key_scales_ + key,
            means_ + (plan.first_head + kv_head) * kMaxHeadDim,
            wild_ + plan.first_block + kv_head * plan.blocks};
  }

  int sum_item(int64_t i) {
    const Item item = find(i, &Plan::first_sum_item, sum_items_of);
    const Plan& plan = *item.plan;
    const int64_t base = plan.first_chunk + item.kv_head * plan.chunks, first = item.index * kChunksPerItem;
    for (int64_t c = first; c < std::min(first + kChunksPerItem, plan.chunks); c++)
      chunk_finite_[base + c] = kernel_.sum_keys(p_, plan.sequence, item.kv_head, c * kInt8MeanChunk,
                                                 std::min((c + 1) * kInt8MeanChunk, plan.sequence.len_k),
                                                 chunk_sums_ + (base + c) * p_.head_dim);
    return QF_OK;
  }

  int mean_item(int64_t i) {
    const Plan& plan = plans_[size_t(i / p_.kv_heads)];
    const int64_t base = plan.first_chunk + i % p_.kv_heads * plan.chunks;
    double total[kMaxHeadDim] = {};
    int64_t finite = 0;
    for (int64_t c = base; c < base + plan.chunks; c++) {
      finite += chunk_finite_[c];
      for (int d = 0; d < p_.head_dim; d++) total[d] += double(chunk_sums_[c * p_.head_dim + d]);
    }
    for (int d = 0; d < kMaxHeadDim; d++) {
      const float mean = float(total[d] / double(std::max<int64_t>(finite, 1)));
      means_[i * kMaxHeadDim + d] = std::isfinite(mean) ? mean : 0.0f;
    }
    return QF_OK;
  }

  int pack_item(int64_t i) {
    const Item item = find(i, &Plan::first_pack_item, [](const Plan& plan) { return plan.blocks; });
    const Plan& plan = *item.plan;
    const int64_t first = item.index * kInt8KeyBlock;
    if (first < plan.keys.end && first + kInt8KeyBlock > plan.keys.begin)
      kernel_.pack_block(p_, plan.sequence, head_of(plan, item.kv_head), item.index);
    return QF_OK;
  }

  // Rows of row block `index`, counted from the end: with a causal mask the long ones are there and must start first.
  struct Rows {
    int64_t first;
    int count;
  };
  Rows rows_of(const Plan& plan, int64_t index) const {
    const int64_t first = (plan.row_blocks - 1 - index) * kernel_.row_block;
    return {first, int(std::min<int64_t>(kernel_.row_block, plan.rows - first))};
  }

  int64_t partial_floats() const { return int64_t(kernel_.row_block) * (kernel_.value_width(p_.head_dim) + 2); }
  int64_t partial_index(const Plan& plan, int64_t kv_head, int64_t row_block) const {
    return plan.first_partial + (kv_head * plan.row_blocks + row_block) * plan.shares;
  }

  int attend_item(int64_t i) {
    const Item item = find(i, &Plan::first_attend_item, [](const Plan& plan) { return plan.row_blocks * plan.shares; });
    const Plan& plan = *item.plan;
    const int64_t row_block = item.index / plan.shares, share = item.index % plan.shares;
    const Rows rows = rows_of(plan, row_block);
    const Int8Head head = head_of(plan, item.kv_head);
    if (plan.shares == 1)
      return kernel_.attend(p_, plan.sequence, head, rows.first, rows.count, {0, plan.sequence.len_k}, nullptr);
    const int64_t begin = plan.keys.begin / kInt8KeyBlock * kInt8KeyBlock + share * plan.share_keys;
    const int64_t end = share + 1 == plan.shares ? plan.sequence.len_k : begin + plan.share_keys;
    return kernel_.attend(p_, plan.sequence, head, rows.first, rows.count, {begin, end},
                          &partials_[size_t(partial_index(plan, item.kv_head, row_block) + share)]);
  }

  int merge_item(int64_t i) {
    // Sequences without shares have no merge items, so several plans may start at `i`: find() takes the last, and
    // the one that owns the item is the last of them.
    const Item item = find(i, &Plan::first_merge_item, [](const Plan& plan) { return plan.row_blocks; });
    const Plan& plan = *item.plan;
    const Rows rows = rows_of(plan, item.index);
    return kernel_.merge(p_, plan.sequence, head_of(plan, item.kv_head), rows.first, rows.count,
                         &partials_[size_t(partial_index(plan, item.kv_head, item.index))], plan.shares);
  }

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  const QfAttnParams& p_;
  const Int8Kernel& kernel_;
  std::vector<Plan> plans_;
  std::vector<Int8Partial> partials_;
  int64_t keys_ = 0, blocks_ = 0, chunks_ = 0, partial_count_ = 0;
  int64_t sum_items_ = 0, pack_items_ = 0, attend_items_ = 0, merge_items_ = 0;
  std::unique_ptr<char, Free> arena_;
  size_t placed_ = 0;
  char *keys_data_ = nullptr, *values_data_ = nullptr;
  float *key_scales_ = nullptr, *means_ = nullptr, *chunk_sums_ = nullptr, *partial_data_ = nullptr;
  uint8_t* wild_ = nullptr;
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
