// The top level of the forward pass: checks, cuts the problem into blocks of rows, runs them on all threads.
//
// Two paths, by the number of rows (queries times query heads) that share a KV head:
//   many   K and V are packed once, for as many KV heads as fit the budget; then the blocks of those heads run
//   few    one block has all the rows; it is cut along the keys, and partial results are merged
// Whether and where a block is cut follows from the whole problem; with batch_invariant from its own sequence alone.
#include <algorithm>
#include <new>
#include <vector>

#include "checks.h"
#include "forward.h"
#include "memory.h"
#include "sizes.h"
#include "threads.h"

namespace qf {
namespace {

constexpr int64_t kBlockRows = 192;
constexpr int64_t kLeastRows = 48;  // blocks shrink to this when there would be too few for the threads
constexpr int64_t kBlocksPerThread = 4;
constexpr int64_t kRowStep = 6;  // rows that are multiplied together
constexpr int64_t kPackedBytes = int64_t(64) << 20;
// Few blocks are cut along the keys. The cut follows from constants, not from the thread count: it determines the order
// of summation, hence the bits.
constexpr int64_t kFewBlocks = 64;
constexpr int64_t kMostSplits = 64;
constexpr int64_t kSplitKeys = 512;

class Forward {
 public:
  Forward(const QfAttnParams& p, Isa isa) : p_(p), isa_(isa), group_(p.q_heads / p.kv_heads) {}

  int run() {
    const int64_t units = int64_t(p_.batch) * p_.kv_heads;
    if (p_.q_len * group_ <= kBlockRows) return run_few(units);
    choose_rows(units);
    for (int64_t first = 0, last; first < units; first = last) {
      int64_t tiles = 0;
      for (last = first; last < units; last++) {
        const int64_t more = tiles_of(last);
        if (last > first && (tiles + more) * tile_bytes() > kPackedBytes) break;
        tiles += more;
      }
      if (int status = run_many(first, last, tiles)) return status;
    }
    return QF_OK;
  }

 private:
  // A unit is one KV head of one sequence.
  Sequence sequence_of_unit(int64_t unit) const { return sequence_of(p_, unit / p_.kv_heads); }
  int64_t tiles_of(int64_t unit) const { return ceil_div(sequence_of_unit(unit).len_k, kTileKeys); }
  int64_t tile_bytes() const { return packed_tile_floats(p_.head_dim) * int64_t(sizeof(float)); }

  // Smaller blocks when the threads would otherwise starve. A row's bits do not depend on its block.
  void choose_rows(int64_t units) {
    const int64_t wanted = kBlocksPerThread * resolve_threads(p_.num_threads);
    const auto blocks = [&] { return units * ceil_div(p_.q_len * group_, rows_); };
    while (rows_ > kLeastRows && blocks() < wanted) rows_ /= 2;
  }

  // The blocks of units [first, last): of each sequence, query block by query block with the heads inside, because
  // neighbouring heads of q and out share pages.
  std::vector<RowBlock> make_blocks(int64_t first, int64_t last) const {
    std::vector<RowBlock> blocks;
    for (int64_t begin = first, end; begin < last; begin = end) {
      end = std::min(last, (begin / p_.kv_heads + 1) * p_.kv_heads);
      const Sequence s = sequence_of_unit(begin);
      if (s.len_q == 0) continue;
      // Blocks of one sequence have equal sizes: ten rows left over would cost a separate pass over the keys.
      const int64_t query_blocks = ceil_div(s.len_q, rows_);
      const int64_t queries = std::min(s.len_q, ceil_div(ceil_div(s.len_q, query_blocks), kRowStep) * kRowStep);
      const int64_t heads = std::min(group_, std::max<int64_t>(1, rows_ / queries));
      const bool direct = s.len_q * group_ <= kDirectRows;
      for (int64_t q = 0; q < s.len_q; q += queries)
        for (int64_t kv_head = begin % p_.kv_heads; kv_head < begin % p_.kv_heads + end - begin; kv_head++)
          for (int64_t h = 0; h < group_; h += heads)
            blocks.push_back({s, kv_head, kv_head * group_ + h, std::min(heads, group_ - h), q,
                              std::min(queries, s.len_q - q), 0, s.len_k, direct, nullptr, nullptr});
    }
    return blocks;
  }

  // Most expensive first, so that the last to finish are small.
  void sort_blocks(std::vector<RowBlock>& blocks) const {
    if (p_.window_left < 0 && p_.window_right < 0 && !p_.kv_lens && !p_.cu_seqlens_q) return;
    const auto work = [this](const RowBlock& x) {
      const KeyRange keys = keys_of_any(p_, x.sequence, x.first_query, x.first_query + x.queries - 1);
      return (keys.end - keys.begin) * x.heads * x.queries;
    };
    std::stable_sort(blocks.begin(), blocks.end(),
                     [&](const RowBlock& a, const RowBlock& b) { return work(a) > work(b); });
  }

  int run_blocks(const std::vector<RowBlock>& blocks) const {
    auto run = [&, block = QF_PICK(isa_, forward_block)](int64_t i) { return block(p_, blocks[size_t(i)]); };
    return parallel_for(int64_t(blocks.size()), p_.num_threads, run);
  }

  int run_sorted(std::vector<RowBlock>& blocks) const {
    sort_blocks(blocks);
    return run_blocks(blocks);
  }

  int run_many(int64_t first, int64_t last, int64_t tiles) {
    float* packed = static_cast<float*>(call_scratch(size_t(tiles * tile_bytes())));
    if (!packed) return QF_NO_MEMORY;
    std::vector<float*> start(size_t(last - first));
    for (int64_t unit = first; unit < last; unit++) {
      start[size_t(unit - first)] = packed;
      packed += tiles_of(unit) * packed_tile_floats(p_.head_dim);
    }
    int status = pack_units(first, last, start);
    if (status == QF_OK) {
      std::vector<RowBlock> blocks = make_blocks(first, last);
      for (RowBlock& x : blocks)
        x.packed = x.direct ? nullptr : start[size_t(x.sequence.batch * p_.kv_heads + x.kv_head - first)];
      status = p_.batch_invariant ? run_cut_by_sequence(blocks) : run_sorted(blocks);
    }
    release_call_scratch();
    return status;
  }

  // Tile by tile with the heads inside: neighbouring heads share pages.
  int pack_units(int64_t first, int64_t last, const std::vector<float*>& start) const {
    struct Task {
      int64_t unit, tile;
    };
    std::vector<Task> tasks;
    for (int64_t begin = first, end; begin < last; begin = end) {
      end = std::min(last, (begin / p_.kv_heads + 1) * p_.kv_heads);
      for (int64_t tile = 0; tile < tiles_of(begin); tile++)
        for (int64_t unit = begin; unit < end; unit++) tasks.push_back({unit, tile});
    }
    auto pack = [&, pack = QF_PICK(isa_, pack_tile)](int64_t i) {
      const auto [unit, tile] = tasks[size_t(i)];
      return pack(p_, sequence_of_unit(unit), unit % p_.kv_heads, tile * kTileKeys,
                  start[size_t(unit - first)] + tile * packed_tile_floats(p_.head_dim));
    };
    return parallel_for(int64_t(tasks.size()), p_.num_threads, pack);
  }

  // Keys of the longest sequence. For arrays it is their length: the bits follow from shapes alone. A page table has
  // room for many more tokens than there are.
  int64_t longest() const {
    if (!p_.kv.page_size) return p_.k_len;
    int64_t most = 0;
    for (int64_t b = 0; b < p_.batch; b++) most = std::max(most, sequence_of(p_, b).len_k);
    return most;
  }

  // Keys per split, for `keys` keys in total.
  static int64_t split_keys(int64_t keys) {
    return round_up(std::max(ceil_div(keys, kMostSplits), kSplitKeys), kTileKeys);
  }

  int run_few(int64_t units) const {
    std::vector<RowBlock> blocks = make_blocks(0, units);
    if (p_.batch_invariant) return run_cut_by_sequence(blocks);
    const int64_t keys = split_keys(longest());
    if (int64_t(blocks.size()) >= kFewBlocks || keys >= longest()) return run_sorted(blocks);
    const int64_t splits = ceil_div(longest(), keys);
    std::vector<CutBlock> cut;
    for (const RowBlock& x : blocks) cut.push_back({x, keys, splits});
    return run_splits(cut, {});
  }

  // A sequence of few rows is cut as if it were alone, and the others are not. A row's bits do not depend on its block,
  // and so on nothing but the sequence.
  int run_cut_by_sequence(const std::vector<RowBlock>& blocks) const {
    std::vector<CutBlock> cut;
    std::vector<RowBlock> whole;
    for (const RowBlock& x : blocks) {
      const int64_t keys = split_keys(x.sequence.len_k);
      if (x.sequence.len_q * group_ <= kBlockRows && keys < x.sequence.len_k)
        cut.push_back({x, keys, ceil_div(x.sequence.len_k, keys)});
      else
        whole.push_back(x);
    }
    return run_splits(cut, whole);
  }

  struct CutBlock {
    RowBlock block;
    int64_t keys, splits;  // keys per split; splits of the block
  };

  // Also runs blocks that are not cut.
  int run_splits(std::vector<CutBlock>& cut, const std::vector<RowBlock>& whole) const {
    const int64_t row_floats = p_.head_dim + 2;
    int64_t floats = 0, most = 0;
    for (const CutBlock& x : cut) {
      floats += x.splits * x.block.heads * x.block.queries * row_floats;
      most = std::max(most, x.splits);
    }
    std::vector<float> partial(static_cast<size_t>(floats));
    float* next = partial.data();
    for (CutBlock& x : cut) {
      x.block.partial = next;
      next += x.splits * x.block.heads * x.block.queries * row_floats;
    }
    std::vector<RowBlock> pieces = whole;
    sort_blocks(pieces);
    // Split by split with the heads inside: neighbouring heads of k and v share pages.
    for (int64_t i = 0; i < most; i++)
      for (const CutBlock& x : cut) {
        if (i >= x.splits) continue;
        const int64_t len_k = x.block.sequence.len_k;
        pieces.push_back(x.block);
        pieces.back().key_begin = std::min(i * x.keys, len_k);
        pieces.back().key_end = std::min((i + 1) * x.keys, len_k);
        pieces.back().partial = x.block.partial + i * x.block.heads * x.block.queries * row_floats;
      }
    if (int status = run_blocks(pieces)) return status;
    auto merge = [&, merge = QF_PICK(isa_, merge_splits)](int64_t i) {
      return merge(p_, cut[size_t(i)].block, cut[size_t(i)].splits);
    };
    return parallel_for(int64_t(cut.size()), p_.num_threads, merge);
  }

  const QfAttnParams& p_;
  const Isa isa_;
  const int64_t group_;        // query heads per KV head
  int64_t rows_ = kBlockRows;  // of a block, at most
};

}  // namespace
}  // namespace qf

extern "C" int qf_cpu(const QfAttnParams* params, void*) {
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  if (int status = qf::check_values(*params, true)) return status;
  try {
    return qf::Forward(*params, isa).run();
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}
