// qf_cpu_bwd: which thread computes which tile of the gradients, and in which order.
//
// A unit is one key head of one sequence with all the query heads that share it. Its keys are cut into blocks; a thread
// takes a block, loops over the query tiles that see it and accumulates dK and dV of the block privately. dQ is shared
// by all blocks of the unit, so every tile has a `turn`: block b adds to the tile's dQ only after block b - 1 has. Sums
// are thus always accumulated in the same order, whatever the number of threads, and every product is computed once.
// Blocks of a unit are assigned in order, so the thread that has the turn is always running and no thread waits
// forever. A thread prefers its own unit (whose dQ then stays in its cache) and helps the others when none is left.
//
// Units are processed in rounds whose float32 copies of q and dout, and dQ, fit a budget: memory is linear in the
// length and does not grow with batch and heads beyond that.

#include "backward.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "checks.h"
#include "interrupt.h"
#include "status.h"
#include "threads.h"

namespace qf {
namespace {

// What a round may take beyond its first unit: as many small units as stay in cache, or one large one per thread.
constexpr int64_t kSmallRoundBytes = int64_t(1) << 20, kLargeRoundBytes = int64_t(64) << 20;

struct Unit {
  Sequence sequence;
  int64_t key_rows;  // rows of dk and dv: those past sequence.len_k become zero
  int kv_head;
  int64_t first_tile = 0;  // in the round's list; tiles of the group's heads are consecutive
  std::atomic<int64_t> next_block{0};

  Unit(const QfAttnParams& p, int64_t batch, int kv_head) : sequence(sequence_of(p, batch)), kv_head(kv_head) {
    key_rows = p.cu_seqlens_k ? p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch] : p.k_len;
  }
  int64_t tiles_per_head() const { return ceil_div(sequence.len_q, kBwdBlock); }
  int64_t blocks() const { return ceil_div(key_rows, kBwdBlock); }
};

struct Tile {
  const Unit* unit;
  int head;
  int64_t first;  // query
  int count;
  QueryTile data;
  bool finite;
  std::atomic<int64_t> turn;  // the block that may add to dQ next
};

class Backward {
 public:
  Backward(const QfAttnBwdParams& params, const BackwardKernels& kernels)
      : params_(params),
        p_(params.fwd),
        kernels_(kernels),
        threads_(resolve_threads(params.fwd.num_threads)),
        group_(p_.q_heads / p_.kv_heads),
        pitch_(round_up(p_.head_dim, kernels.lanes)) {}

  int run() {
    const int64_t units = int64_t(p_.batch) * p_.kv_heads;
    for (int64_t first = 0; first < units;) {
      int64_t end = first, bytes = 0;
      while (end < units && fits(end - first, bytes + bytes_of(sequence_of(p_, end / p_.kv_heads))))
        bytes += bytes_of(sequence_of(p_, end++ / p_.kv_heads));
      if (int status = run_round(first, end, bytes)) return status;
      first = end;
    }
    return QF_OK;
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };

  int64_t padded_rows(const Sequence& s) const { return round_up(s.len_q, kBwdRowMultiple); }
  int64_t bytes_of(const Sequence& s) const {
    return group_ * padded_rows(s) * (3 * pitch_ + 2) * int64_t(sizeof(float));
  }

  // Whether a round of `taken` units takes one more, which would bring it to `bytes`.
  bool fits(int64_t taken, int64_t bytes) const {
    return taken == 0 || bytes <= (taken < threads_ ? kLargeRoundBytes : kSmallRoundBytes) * threads_;
  }

  int run_round(int64_t first, int64_t end, int64_t bytes) {
    if (bytes > workspace_bytes_) {
      workspace_.reset();
      workspace_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(bytes, 64))));
      if (!workspace_) return QF_NO_MEMORY;
      workspace_bytes_ = bytes;
    }
    lay_out(first, end);
    auto load = [this](int64_t i) {
      const Tile& t = tiles_[i];
      if (t.unit->sequence.len_k == 0) return int(QF_OK);
      kernels_.load_queries(params_, t.unit->sequence, t.head, t.first, t.count, t.data);
      return int(QF_OK);
    };
    auto work = [this](int64_t) { return work_on_units(); };
    auto store = [this](int64_t i) {
      const Tile& t = tiles_[i];
      kernels_.store_queries(params_, t.unit->sequence, t.head, t.first, t.count, t.data);
      return int(QF_OK);
    };
    fresh_unit_ = 0;
    if (int status = parallel_for(tile_count_, threads_, load)) return status;
    if (int status = parallel_for(threads_, threads_, work)) return status;
    return parallel_for(tile_count_, threads_, store);
  }

  // Lists the units [first, end), their tiles and where in the workspace each tile lives.
  void lay_out(int64_t first, int64_t end) {
    units_.clear();
    units_.reserve(end - first);
    tile_count_ = 0;
    for (int64_t i = first; i < end; i++) {
      units_.push_back(std::make_unique<Unit>(p_, i / p_.kv_heads, int(i % p_.kv_heads)));
      units_.back()->first_tile = tile_count_;
      tile_count_ += group_ * units_.back()->tiles_per_head();
    }
    tiles_.reset(new Tile[tile_count_]);
    float* space = workspace_.get();
    int64_t index = 0;
    for (const auto& unit : units_) {
      const Sequence& s = unit->sequence;
      for (int g = 0; g < group_; g++)
        for (int64_t row = 0; row < s.len_q; row += kBwdBlock, index++) {
          Tile& t = tiles_[index];
          t.unit = unit.get();
          t.head = int(unit->kv_head * group_ + g);
          t.first = row;
          t.count = int(std::min<int64_t>(kBwdBlock, s.len_q - row));
          const int64_t rows = round_up(t.count, kBwdRowMultiple), plane = rows * pitch_;
          t.data = {space, space + plane, space + 2 * plane, space + 3 * plane, space + 3 * plane + rows, &t.finite};
          t.turn = keys_of_any(p_, s, row, row + t.count - 1).begin / kBwdBlock;
          space += 3 * plane + 2 * rows;
        }
    }
  }

  int work_on_units() {
    KeyBlock block;
    // Before any block is taken: a block that is taken must be finished, because others wait for it.
    if (!take_scratch(&block)) return QF_NO_MEMORY;
    const int64_t count = int64_t(units_.size());
    bool done = true;
    for (int64_t i; done && (i = fresh_unit_.fetch_add(1)) < count;) done = work_on(*units_[i], block);
    for (int64_t i = count; done && i-- > 0;) done = work_on(*units_[i], block);
    return done ? QF_OK : QF_INTERRUPTED;
  }

  bool take_scratch(KeyBlock* block) const {
    const int64_t rows = kBwdBlock * pitch_, square = kBwdBlock * kBwdBlock;
    float* space = static_cast<float*>(thread_scratch((5 * rows + 2 * square) * sizeof(float)));
    if (!space) return false;
    block->k = space;
    block->dk = block->k + rows;
    block->dv = block->dk + rows;
    block->k_t = block->dv + rows;
    block->v_t = block->k_t + rows;
    block->p = block->v_t + rows;
    block->ds = block->p + square;
    return true;
  }

  // False, here and below: interrupted. The turns of other threads then never come, and they return false as well.
  bool work_on(Unit& unit, KeyBlock& block) {
    const int64_t blocks = unit.blocks();
    for (int64_t b; (b = unit.next_block.fetch_add(1)) < blocks;)
      if (!key_block(unit, b, block)) return false;
    return true;
  }

  bool key_block(const Unit& unit, int64_t index, KeyBlock& block) {
    const Sequence& s = unit.sequence;
    const int64_t first = index * kBwdBlock;
    const int rows = int(std::min<int64_t>(kBwdBlock, unit.key_rows - first));
    const int count = int(std::clamp<int64_t>(s.len_k - first, 0, rows));
    if (count > 0) {
      kernels_.load_keys(params_, s, unit.kv_head, first, count, block);
      const KeyRange queries = queries_of_keys(p_, s, first, first + count - 1);
      for (int g = 0; g < group_ && queries.begin < queries.end; g++) {
        Tile* tiles = &tiles_[unit.first_tile + g * unit.tiles_per_head()];
        for (int64_t t = queries.begin / kBwdBlock; t * kBwdBlock < queries.end; t++) {
          Tile& tile = tiles[t];
          const TileMask mask = mask_of(s, tile, first, count);
          kernels_.probabilities(params_, tile.data, mask, block);
          kernels_.add_to_keys(params_, tile.data, mask, block);
          if (!wait_for(tile.turn, index)) return false;
          kernels_.add_to_queries(params_, tile.data, mask, block);
          tile.turn.store(index + 1, std::memory_order_release);
        }
      }
    }
    kernels_.store_keys(params_, s, unit.kv_head, first, count, rows, block);
    return true;
  }

  TileMask mask_of(const Sequence& s, const Tile& tile, int64_t first_key, int keys) const {
    constexpr int64_t kOpen = 2 * kBwdBlock;  // beyond every row and column of the tile
    const int64_t diagonal = tile.first + s.len_k - s.len_q - first_key;
    const int64_t low = p_.window_left < 0 ? -kOpen : std::clamp(diagonal - p_.window_left, -kOpen, kOpen);
    const int64_t high = p_.window_right < 0 ? kOpen : std::clamp(diagonal + p_.window_right + 1, -kOpen, kOpen);
    return {tile.count, keys, int(low), int(high)};
  }

  // The thread that has the turn has its products ready or almost ready: the wait is short.
  static bool wait_for(const std::atomic<int64_t>& turn, int64_t index) {
    if (interrupted()) return false;
    for (int spin = 0; turn.load(std::memory_order_acquire) != index; spin++) {
      if (spin <= 100) continue;
      if (interrupted()) return false;
      sched_yield();
    }
    return true;
  }

  const QfAttnBwdParams& params_;
  const QfAttnParams& p_;
  const BackwardKernels& kernels_;
  const int32_t threads_;
  const int64_t group_, pitch_;
  std::unique_ptr<float, Free> workspace_;
  int64_t workspace_bytes_ = 0;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Tile[]> tiles_;
  int64_t tile_count_ = 0;
  std::atomic<int64_t> fresh_unit_{0};
};

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_bwd(const QfAttnBwdParams* params, void*) {
  using namespace qf;
  if (params->struct_bytes != int32_t(sizeof *params)) return QF_BAD_ABI;
  if (int status = check_values(params->fwd)) return status;
  Isa isa;
  if (int status = choose_isa(&isa)) return status;
  if (!params->fwd.lse) return fail(QF_BAD_VALUE, "lse is missing; allowed: what the forward pass returned");
  try {
    const BackwardKernels& kernels = QF_PICK(isa, backward_kernels);
    if (params->fwd.sinks && params->dsinks)
      if (int status = sink_gradient(*params, kernels)) return status;
    return Backward(*params, kernels).run();
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}
