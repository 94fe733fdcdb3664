// qf_cpu_quantize and qf_cpu_dequantize: checks, and the passes over tokens on all threads.
//
//   scales per token or group   one pass: a task takes whole groups of one head
//   per tensor                  two: every task's extent, joined; then the integers
//   smoothing                   before that, sums of chunks, joined in order
// A group that does not fit the scratch memory is loaded twice.
#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "memory.h"
#include "sizes.h"
#include "status.h"
#include "threads.h"

namespace qf {

void Extent::join(const Extent& other) {
  largest = std::max(largest, other.largest);
  above = std::max(above, other.above);
  below = std::max(below, other.below);
  any_finite |= other.any_finite;
  any_nonfinite |= other.any_nonfinite;
}

namespace {

using LongLong = long long;

constexpr int64_t kBlockFloats = 32 * 1024;  // of tokens that are held at a time: half of a typical second-level cache
constexpr int64_t kTaskTokens = 256;         // per task, or one group when that is longer

Scale symmetric_scale(const Extent& extent) {
  if (extent.any_nonfinite && !extent.any_finite) return {NAN, 0.0f, 0.0f};
  return scale_of_amplitude(number_of(extent.largest));
}

// Halves, because the range itself may overflow.
Scale asymmetric_scale(const Extent& extent) {
  if (extent.any_nonfinite) return {NAN, 0.0f, 0.0f};
  const float half_range = 0.5f * extent.above + 0.5f * extent.below;
  if (half_range < kNoAmplitude) return {0.0f, 0.0f, 0.0f};
  const float inverse = 127.5f / half_range, zero_point = std::rint(-128.0f + extent.below * inverse);
  return {half_range / 127.5f, inverse, std::min(std::max(zero_point, -128.0f), 127.0f)};
}

int check_lens(const QfQuantizeParams& p) {
  for (int32_t b = 0; p.lens && b < p.batch; b++)
    if (p.lens[b] < 0 || p.lens[b] > p.length)
      return fail(QF_BAD_VALUE, "lens[%d] is %d; allowed: 0 to %d", b, p.lens[b], p.length);
  return QF_OK;
}

int64_t length_of(const QfQuantizeParams& p, int64_t b) { return p.lens ? p.lens[b] : p.length; }

// Positions of tokens that exist; without them, the last token's bounds the rest.
int check_positions(const QfQuantizeParams& p) {
  const QfRope& rope = p.rope;
  if (!rope.cos) return QF_OK;
  for (int32_t b = 0; b < p.batch; b++) {
    const int64_t len = length_of(p, b);
    if (!rope.positions_k && len > rope.rows)
      return fail(QF_BAD_VALUE, "the position of token %lld is %lld; allowed: %d to %d, the rows of rope.cos",
                  LongLong(len - 1), LongLong(len - 1), 1 - rope.rows, rope.rows - 1);
    for (int64_t t = 0; rope.positions_k && t < len; t++) {
      const int64_t index = b * rope.stride_positions_k_b + t, position = rope.positions_k[index];
      if (position <= -int64_t(rope.rows) || position >= rope.rows)
        return fail(QF_BAD_VALUE, "rope.positions_k[%lld] is %lld; allowed: %d to %d, the rows of rope.cos",
                    LongLong(index), LongLong(position), 1 - rope.rows, rope.rows - 1);
    }
  }
  return QF_OK;
}

int check(const QfQuantizeParams& p) {
  if (p.struct_bytes != int32_t(sizeof p)) return QF_BAD_ABI;
  if (p.cu_seqlens || p.queries || p.q_dot_mean)
    return fail(QF_UNSUPPORTED, "kernel 'cpu_quantize' takes no packed sequences, queries or q_dot_mean");
  if (p.granularity != QF_PER_TENSOR && !p.symmetric)
    return fail(QF_UNSUPPORTED, "symmetric is 0; allowed: 1 unless there is one scale per tensor");
  if (int status = check_lens(p)) return status;
  return check_positions(p);
}

class Quantize {
 public:
  Quantize(const QfQuantizeParams& p, Isa isa)
      : p_(p),
        isa_(isa),
        stride_(round_up(p.head_dim, 16) + 16),
        block_tokens_(std::max<int64_t>(1, kBlockFloats / stride_)),
        group_(p.granularity == QF_PER_TENSOR ? 1 : p.group),
        groups_(ceil_div(p.length, group_)),
        task_tokens_(round_up(std::max(kTaskTokens, group_), group_)),
        tasks_per_head_(ceil_div(p.length, task_tokens_)) {}

  int run() {
    if (p_.smooth)
      if (int status = find_means()) return status;
    if (p_.granularity == QF_PER_TENSOR) return run_tensor();
    return pass([this](const Range& range) {
      for (int64_t first = range.first; first < range.end; first += group_) quantize_group(range, first);
    });
  }

 private:
  // Tokens first .. end - 1 of one head, as described; those from `len` on do not exist.
  struct Range {
    int64_t b, h, first, end, len;
    TokenBlock scratch;
    int64_t task;
  };

  // Calls `work` for every task_tokens_ tokens of every head.
  template <class Work>
  int pass(Work work) {
    auto one = [&](int64_t task) {
      const int64_t head = task / tasks_per_head_, b = head / p_.heads, first = task % tasks_per_head_ * task_tokens_;
      Range range{b, head % p_.heads, first, std::min<int64_t>(first + task_tokens_, p_.length), 0, {}, task};
      range.len = length_of(p_, b);
      if (!take_scratch(range.scratch)) return int(QF_NO_MEMORY);
      work(range);
      return int(QF_OK);
    };
    return parallel_for(int64_t(p_.batch) * p_.heads * tasks_per_head_, p_.num_threads, one);
  }

  bool take_scratch(TokenBlock& block) const {
    const size_t floats = size_t(block_tokens_ * stride_);
    block.rows = static_cast<float*>(thread_scratch(floats * sizeof(float) + size_t(block_tokens_)));
    block.nonfinite = reinterpret_cast<uint8_t*>(block.rows + floats);
    block.stride = stride_;
    return block.rows != nullptr;
  }

  const float* mean_of(const Range& range) const {
    return p_.smooth ? p_.mean + (range.b * p_.heads + range.h) * p_.head_dim : nullptr;
  }

  // Calls `work` for those of tokens first .. end - 1 that exist, as many at a time as scratch holds. Loaded tokens
  // stay: `loaded` is the first token of the block that scratch holds, -1 for none.
  template <class Work>
  void each_block(const Range& range, int64_t first, int64_t end, const float* mean, int64_t& loaded, Work work) const {
    end = std::min(end, range.len);
    for (int64_t t = first; t < end; t += block_tokens_) {
      TokenBlock block = range.scratch;
      block.b = range.b, block.h = range.h, block.first = t, block.count = std::min(block_tokens_, end - t);
      if (loaded != t) QF_PICK(isa_, load_tokens)(p_, block, mean);
      loaded = t;
      work(block);
    }
  }

  Extent extent_of(const Range& range, int64_t first, int64_t end, int64_t& loaded) const {
    Extent extent;
    each_block(range, first, end, mean_of(range), loaded,
               [&](const TokenBlock& block) { extent.join(QF_PICK(isa_, extent_of_tokens)(p_, block)); });
    return extent;
  }

  void round(const Range& range, int64_t first, int64_t end, const Scale& scale, int64_t& loaded) const {
    each_block(range, first, end, mean_of(range), loaded,
               [&](const TokenBlock& block) { QF_PICK(isa_, round_tokens)(p_, block, scale); });
    for (int64_t t = std::max(first, range.len); t < end; t++) {
      std::memset(static_cast<char*>(p_.values.data) + range.b * p_.values.stride_b + t * p_.values.stride_t +
                      range.h * p_.values.stride_h,
                  0, size_t(p_.head_dim));
      if (p_.sums) p_.sums[(range.b * p_.heads + range.h) * p_.length + t] = 0;
    }
  }

  void quantize_group(const Range& range, int64_t first) const {
    const int64_t end = std::min(first + group_, range.end);
    int64_t loaded = -1;
    const Scale scale = symmetric_scale(extent_of(range, first, end, loaded));
    p_.scale[(range.b * p_.heads + range.h) * groups_ + first / group_] = scale.scale;
    round(range, first, end, scale, loaded);
  }

  int run_tensor() {
    std::vector<Extent> extents(size_t(int64_t(p_.batch) * p_.heads * tasks_per_head_));
    int status = pass([&](const Range& range) {
      int64_t loaded = -1;
      extents[size_t(range.task)] = extent_of(range, range.first, range.end, loaded);
    });
    if (status != QF_OK) return status;
    Extent whole;
    for (const Extent& extent : extents) whole.join(extent);
    const Scale scale = p_.symmetric ? symmetric_scale(whole) : asymmetric_scale(whole);
    *p_.scale = scale.scale;
    if (!p_.symmetric) *p_.zero_point = int32_t(scale.zero_point);
    return pass([&](const Range& range) {
      int64_t loaded = -1;
      round(range, range.first, range.end, scale, loaded);
    });
  }

  // Tokens are added serially in float32 within chunks, the chunks in float64.
  int find_means() {
    const int64_t n = p_.head_dim, chunks = ceil_div(p_.length, kMeanChunk);
    const int64_t heads = int64_t(p_.batch) * p_.heads;
    std::vector<float> sums(size_t(heads * chunks * n));
    std::vector<int32_t> finite(size_t(heads * chunks));
    auto sum_chunk = [&](int64_t task) {
      const int64_t head = task / chunks, first = task % chunks * kMeanChunk;
      Range range{head / p_.heads, head % p_.heads, first, 0, length_of(p_, head / p_.heads), {}, task};
      if (!take_scratch(range.scratch)) return int(QF_NO_MEMORY);
      // Token by token: a chunk that is loaded in several blocks is still one sum.
      float* total = sums.data() + task * n;
      int64_t loaded = -1;
      each_block(range, first, first + kMeanChunk, nullptr, loaded,
                 [&](const TokenBlock& block) { finite[size_t(task)] += QF_PICK(isa_, sum_tokens)(p_, block, total); });
      return int(QF_OK);
    };
    if (int status = parallel_for(heads * chunks, p_.num_threads, sum_chunk)) return status;
    auto join_chunks = [&](int64_t head) {
      int64_t count = 0;
      for (int64_t c = head * chunks; c < (head + 1) * chunks; c++) count += finite[size_t(c)];
      for (int64_t d = 0; d < n; d++) {
        double total = 0;
        for (int64_t c = head * chunks; c < (head + 1) * chunks; c++) total += double(sums[size_t(c * n + d)]);
        const float mean = float(total / double(std::max<int64_t>(count, 1)));
        p_.mean[head * n + d] = std::isfinite(mean) ? mean : 0.0f;
      }
      return int(QF_OK);
    };
    return parallel_for(heads, p_.num_threads, join_chunks);
  }

  const QfQuantizeParams& p_;
  const Isa isa_;
  const int64_t stride_, block_tokens_, group_, groups_, task_tokens_, tasks_per_head_;
};

int dequantize(const QfDequantizeParams& p, Isa isa) {
  const int64_t tasks_per_head = ceil_div(p.length, kTaskTokens);
  auto one = [&](int64_t task) {
    const int64_t head = task / tasks_per_head, first = task % tasks_per_head * kTaskTokens;
    return QF_PICK(isa, dequantize_tokens)(p, head / p.heads, head % p.heads, first,
                                           std::min(kTaskTokens, p.length - first));
  };
  return parallel_for(int64_t(p.batch) * p.heads * tasks_per_head, p.num_threads, one);
}

}  // namespace
}  // namespace qf

extern "C" int qf_cpu_quantize(const QfQuantizeParams* params, void*) {
  if (int status = qf::check(*params)) return status;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  try {
    return qf::Quantize(*params, isa).run();
  } catch (const std::bad_alloc&) {
    return QF_NO_MEMORY;
  }
}

extern "C" int qf_cpu_dequantize(const QfDequantizeParams* params, void*) {
  if (params->struct_bytes != int32_t(sizeof *params)) return QF_BAD_ABI;
  qf::Isa isa;
  if (int status = qf::choose_isa(&isa)) return status;
  return qf::dequantize(*params, isa);
}
