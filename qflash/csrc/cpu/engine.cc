// The forward pass from outside: checks, cuts the problem into blocks of rows, runs them on all threads.
#include <algorithm>
#include <new>
#include <vector>

#include "checks.h"
#include "forward.h"
#include "threads.h"

namespace qf {
namespace {

constexpr int64_t kBlockRows = 192;  // enough rows to make packing a tile of K and V cheap
constexpr int64_t kLeastRows = 48;   // blocks shrink to this when there would be too few for the threads
constexpr int64_t kBlocksPerThread = 4;
constexpr int64_t kRowStep = 6;  // rows that are multiplied together
// Few rows against many keys are cut along the keys instead, into about kSplitItems pieces of no fewer than
// kSplitKeys. Both are constants, not functions of the thread count: the cut decides the order of the sums, hence the
// bits.
constexpr int64_t kSplitItems = 64;
constexpr int64_t kSplitKeys = 4 * kTileKeys;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the rows of one sequence and one KV head are cut.
struct Cut {
  int64_t heads, queries;  // per block
  int64_t head_blocks, query_blocks;
};

Cut cut_rows(int64_t queries, int64_t group, int64_t rows) {
  Cut cut;
  if (queries >= rows) {
    cut.heads = 1;
    cut.query_blocks = ceil_div(queries, rows);
    cut.queries = ceil_div(ceil_div(queries, cut.query_blocks), kRowStep) * kRowStep;
    cut.query_blocks = ceil_div(queries, cut.queries);
  } else {
    cut.heads = std::min(group, std::max<int64_t>(1, rows / std::max<int64_t>(queries, 1)));
    cut.queries = queries;
    cut.query_blocks = 1;
  }
  cut.head_blocks = ceil_div(group, cut.heads);
  return cut;
}

int64_t count_blocks(const QfAttnParams& p, int64_t rows) {
  int64_t blocks = 0;
  for (int64_t b = 0; b < p.batch; b++) {
    const Sequence s = sequence_of(p, b);
    if (s.len_q == 0) continue;
    const Cut cut = cut_rows(s.len_q, p.q_heads / p.kv_heads, rows);
    blocks += p.kv_heads * cut.head_blocks * cut.query_blocks;
  }
  return blocks;
}

// Every block of the problem, dearest first: the last ones to finish are then the small ones.
std::vector<RowBlock> make_blocks(const QfAttnParams& p, int64_t rows) {
  const int64_t group = p.q_heads / p.kv_heads;
  std::vector<RowBlock> blocks;
  for (int64_t b = 0; b < p.batch; b++) {
    const Sequence s = sequence_of(p, b);
    if (s.len_q == 0) continue;
    const Cut cut = cut_rows(s.len_q, group, rows);
    const bool direct = s.len_q * group <= kDirectRows;
    for (int64_t kv_head = 0; kv_head < p.kv_heads; kv_head++)
      for (int64_t h = 0; h < group; h += cut.heads)
        for (int64_t q = 0; q < s.len_q; q += cut.queries)
          blocks.push_back({s, kv_head, kv_head * group + h, std::min(cut.heads, group - h), q,
                            std::min(cut.queries, s.len_q - q), 0, s.len_k, direct, nullptr});
  }
  const auto work = [&p](const RowBlock& x) {
    const KeyRange keys = keys_of_any(p, x.sequence, x.first_query, x.first_query + x.queries - 1);
    return (keys.end - keys.begin) * x.heads * x.queries;
  };
  if (p.window_left >= 0 || p.window_right >= 0 || p.kv_lens || p.cu_seqlens_q)
    std::stable_sort(blocks.begin(), blocks.end(),
                     [&](const RowBlock& a, const RowBlock& b) { return work(a) > work(b); });
  return blocks;
}

// Keys per split; 0 when the blocks are not to be split.
int64_t split_length(const QfAttnParams& p, int64_t blocks) {
  const int64_t most_rows = int64_t(p.q_len) * (p.q_heads / p.kv_heads);
  if (most_rows > kBlockRows || blocks == 0 || blocks >= kSplitItems) return 0;
  const int64_t wanted = ceil_div(p.k_len, ceil_div(kSplitItems, blocks));
  const int64_t keys = ceil_div(std::max(wanted, kSplitKeys), kTileKeys) * kTileKeys;
  return keys < p.k_len ? keys : 0;
}

int run_blocks(const QfAttnParams& p, Isa isa, const std::vector<RowBlock>& blocks) {
  auto run = [&, block = QF_PICK(isa, forward_block)](int64_t i) { return block(p, blocks[size_t(i)]); };
  return parallel_for(int64_t(blocks.size()), p.num_threads, run);
}

int run_splits(const QfAttnParams& p, Isa isa, std::vector<RowBlock>& blocks, int64_t keys) {
  const int64_t splits = ceil_div(p.k_len, keys);
  int64_t floats = 0;
  for (const RowBlock& x : blocks) floats += splits * x.heads * x.queries * (p.head_dim + 2);
  std::vector<float> partial(static_cast<size_t>(floats));
  std::vector<RowBlock> pieces;
  float* next = partial.data();
  for (RowBlock& x : blocks) {
    x.partial = next;
    for (int64_t i = 0; i < splits; i++) {
      pieces.push_back(x);
      pieces.back().key_begin = std::min(i * keys, x.sequence.len_k);
      pieces.back().key_end = std::min((i + 1) * keys, x.sequence.len_k);
      pieces.back().partial = next;
      next += x.heads * x.queries * (p.head_dim + 2);
    }
  }
  if (int status = run_blocks(p, isa, pieces)) return status;
  auto merge = [&, merge = QF_PICK(isa, merge_splits)](int64_t i) { return merge(p, blocks[size_t(i)], splits); };
  return parallel_for(int64_t(blocks.size()), p.num_threads, merge);
}

int forward(const QfAttnParams& p) {
  Isa isa;
  if (int status = choose_isa(&isa)) return status;
  if (int status = check_values(p)) return status;
  const int64_t enough = kBlocksPerThread * resolve_threads(p.num_threads);
  int64_t rows = kBlockRows;
  while (rows > kLeastRows && count_blocks(p, rows) < enough) rows /= 2;
  const int64_t split = split_length(p, count_blocks(p, kBlockRows));
  std::vector<RowBlock> blocks = make_blocks(p, split ? kBlockRows : rows);
  return split ? run_splits(p, isa, blocks, split) : run_blocks(p, isa, blocks);
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu(const QfAttnParams* params, void*) {
  try {
    return qf::forward(*params);
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}
