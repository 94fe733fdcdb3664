// Units as one warp describes them to the teams that copy their own tiles, and the queries of each unit. That warp has
// nothing else to do, or it is the first of those that attend (kUnitsWarp).
#pragma once

#include "attn/decode/kept_queries.cuh"
#include "attn/decode/merge.cuh"
#include "attn/decode/product.cuh"
#include "attn/decode/team_copy.cuh"
#include "attn/decode/unit.cuh"
#include "ptx/griddepcontrol.cuh"

namespace qf {
namespace decode {

// A row of q as quantize_queries() reads it: rotated and rounded to q's type, sixteen channels at a time.
template <class Element>
struct RotatedRow {
  const QfAttnParams& p;
  const Aligned& aligned;
  const Element* g_row;
  int position, d;

  __device__ __forceinline__ RotatedRow operator+(int column) const { return {p, aligned, g_row, position, column}; }
  __device__ __forceinline__ uint4 chunk(int channel) const {
    return rotated_chunk(p.rope, g_row, channel, p.head_dim, position, aligned.q, aligned.rope);
  }
};
template <class Element>
__device__ __forceinline__ void load16(float (&x)[16], const RotatedRow<Element>& row, bool) {
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    const uint4 raw = row.chunk(row.d + i);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) x[i + e] = to_float(Element{uint16_t(words[e / 2] >> 16 * (e % 2))});
  }
}

// The queries of a part's unit, rotated where rope is given, as the products take them. By whole warps: threads
// `thread` of `threads`.
template <class Config>
__device__ __forceinline__ void fetch_queries(const QfAttnParams& p, const Aligned& aligned, const Part& part,
                                              char* s_queries, int thread, int threads) {
  using Element = typename Config::Element;
  if constexpr (Config::kKept) {
    quantize_kept_queries<Config>(p, part, aligned.q, s_queries, thread, threads);
    return;
  }
  if (!p.rope.cos) {
    if constexpr (Config::kInt8)
      quantize_queries<Config>(p, p.q, part.b, part.kv_head, aligned.q, s_queries, thread, threads);
    else
      copy_queries<Config>(p, p.q, part.b, part.kv_head, aligned.q, s_queries, thread, threads);
    return;
  }
  const int group = p.q_heads / p.kv_heads, keys = p.kv_lens ? p.kv_lens[part.b] : p.k_len;
  const auto rotated = [&](int row) {
    const int token = row / group, head = part.kv_head * group + row - token * group;
    const Element* const g_row =
        static_cast<const Element*>(p.q.data) + part.b * p.q.stride_b + token * p.q.stride_t + head * p.q.stride_h;
    return RotatedRow<Element>{p, aligned, g_row, position_q(p.rope, part.b, 0, token, p.q_len, keys), 0};
  };
  if constexpr (Config::kInt8) {
    const float* const g_mean = wants_dot_k_mean(p) ? p.kv.k_mean + int64_t(part.kv_head) * p.head_dim : nullptr;
    quantize_queries<Config>(p.q_len * group, p.head_dim, rotated, aligned.q, g_mean, s_queries, thread, threads);
  } else {
#pragma unroll 1
    for (int i = thread; i < Config::kRows * Config::kChunks; i += threads) {
      const int row = i / Config::kChunks, chunk = i % Config::kChunks, d = chunk * kPerChunk;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (row < p.q_len * group && d < p.head_dim) value = rotated(row).chunk(d);
      *reinterpret_cast<uint4*>(s_queries + Swizzle<Config::kChunks>::offset(row, chunk)) = value;
    }
  }
}

// Does a unit's description come with queries? Where the share is over, the rows of the unit that is merged last are
// finished with what they multiply K's mean to.
template <class Config>
__device__ __forceinline__ bool wants_queries(const QfAttnParams& p, const Unit<Config>& unit) {
  return unit.tiles >= 0 || (Config::kInt8Queries && unit.part.parts > 0 && wants_dot_k_mean(p));
}

// What that warp does; all of it is collective for the warp.
template <class Config, class Memory>
class UnitWriter {
 public:
  __device__ __forceinline__ UnitWriter(const QfAttnParams& p, const Aligned& aligned, const Partials& partials,
                                        const Memory& memory)
      : p_(p), aligned_(aligned), partials_(partials), memory_(memory) {}

  __device__ __forceinline__ void start(const Runs& runs) const {
    const Share<Config> share(p_, runs);
    if (threadIdx.x % 32 == 0) memory_.state().share = share, memory_.state().ended = Part{};
    __syncwarp();              // the share is in place
    wait_for_previous_grid();  // what it wrote may be q, and it may still read parts
  }
  // The next unit, into a place that nobody looks at. Up to 16 rows it comes with its queries.
  __device__ __forceinline__ void describe(int place) const {
    const Share<Config>& share = memory_.state().share;
    Unit<Config>& unit = memory_.state().units[place];
    const bool over = share.is_over();
    const Part part = over ? memory_.state().ended : share.part();
    describe_unit<Config>(p_, part, unit);
    if (over && threadIdx.x % 32 == 0) unit.tiles = -1;
    __syncwarp();  // the unit is described
    if constexpr (Config::kQueriesAhead)
      if (wants_queries<Config>(p_, unit))
        fetch_queries<Config>(p_, aligned_, part, memory_.queries(place), int(threadIdx.x % 32), 32);
    if (!over && !part.ends()) partials_.clear(part);  // before anybody stores, and before the one that merges looks
  }
  // Where the share is over, and before the last unit is merged.
  __device__ __forceinline__ void await(int place) const {
    const Unit<Config>& unit = memory_.state().units[place];
    if (unit.tiles < 0 && unit.part.parts > 0) partials_.await_announcements(unit.part);
  }
  // Once all warps know of the unit that was described last: on to the next. False: there is none.
  __device__ __forceinline__ bool advance(int place) const {
    const Unit<Config>& unit = memory_.state().units[place];
    if (unit.tiles < 0) return false;
    const Part& part = unit.part;
    if (!part.ends()) partials_.announce(part);
    if (threadIdx.x % 32 == 0) {
      if (part.ends() && !part.is_whole()) memory_.state().ended = part;
      memory_.state().share.advance(p_);
    }
    __syncwarp();  // the share is in place
    return true;
  }
  // All units of the block, one ahead of the teams, into two places in turn. All warps of the block meet once for each:
  // it is described, and nobody looks at the unit before any more.
  __device__ __forceinline__ void describe_all(const Runs& runs) const {
    start(runs);
    for (int place = 0;; place ^= 1) {
      describe(place);
      await(place);
      __syncthreads();
      if (!advance(place)) return;
    }
  }

 private:
  const QfAttnParams& p_;
  const Aligned& aligned_;
  const Partials& partials_;
  Memory memory_;
};

}  // namespace decode
}  // namespace qf
