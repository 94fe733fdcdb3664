// Merges the partial results of several warps, and of several blocks, over different keys of the same rows.
//
// A part is (m, l, exact, O) with weights 2^(score - m). m is an integer, so that changing the reference scales by a
// power of two: the result depends only on the order of the parts, which is the order of the keys.
//
// With kBatchInvariant a part is a split, whichever block computes it, and splits are added one at a time: the result
// is the same bit for bit whether one block does all of it or several do.
#pragma once

#include "attn/decode/share.cuh"
#include "attn/mma/softmax.cuh"
#include "attn/sinks.cuh"
#include "ptx/opaque.cuh"
#include "ptx/relaxed.cuh"

namespace qf {
namespace decode {

// m: reference of the weights; l: sum of the weights as they were multiplied; exact: of the weights themselves.
struct alignas(16) RowSums {
  float m, l, exact, unused;
};

// Four channels of one row.
struct Merged {
  float m = -infinity(), l = 0.0f, exact = 0.0f;
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds further parts, in order. All weights are computed before the first is used: in sequence, that would be slower.
  template <int kParts>
  __device__ __forceinline__ void add(const RowSums (&sums)[kParts], const float4 (&parts)[kParts]) {
    float top = m;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = fmaxf(top, sums[i].m);
    const float reference = reference_of(top), own = ex2(m - reference);
    float weights[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) weights[i] = ex2(sums[i].m - reference);
    m = top;
    l *= own, exact *= own;
    o.x *= own, o.y *= own, o.z *= own, o.w *= own;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      l = fmaf(sums[i].l, weights[i], l);
      exact = fmaf(sums[i].exact, weights[i], exact);
      o.x = fmaf(parts[i].x, weights[i], o.x), o.y = fmaf(parts[i].y, weights[i], o.y);
      o.z = fmaf(parts[i].z, weights[i], o.z), o.w = fmaf(parts[i].w, weights[i], o.w);
    }
  }
  // Adds one further part.
  __device__ __forceinline__ Merged followed_by(const Merged& part) const {
    const RowSums of_part[1] = {part.sums()};
    const float4 channels[1] = {part.o};
    Merged all = *this;
    all.add(of_part, channels);
    return all;
  }
  // Adds the row's sink, once, after all parts.
  __device__ __forceinline__ void join(const WithSink& with) {
    m = with.top, l = with.total(l), exact = with.total(exact);
    o.x *= with.keys, o.y *= with.keys, o.z *= with.keys, o.w *= with.keys;
  }
  __device__ __forceinline__ RowSums sums() const { return {m, l, exact, 0.0f}; }
};

// Parts in global memory: rows of head_dim accumulators and a RowSums. A block writes at most two: of the unit that it
// begins and does not end, and of the unit that it continues; the latter has a slot for each of its splits.
//
// The block that ends a unit merges its parts. It comes after the others in the grid, so they have started when it has,
// and it may wait for them. A 16-byte write signals its own arrival: before it, its first word is kAbsent. The writing
// block stores kAbsent there and then raises a flag; the merging block lowers the flag before it reads.
struct Partials {
  float* begun;      // [block][row][head_dim + 4]
  float* continued;  // [block][slot][row][head_dim + 4]
  float* own;        // [block][row][head_dim / 4][8]: the block's result over the splits of a unit so far; private
  int rows, head_dim, slots;
  unsigned* flags;  // [block][begun, continued], 0 between launches

  static constexpr uint32_t kAbsent = 0xffffffffu, kNan = 0x7fffffffu;

  __device__ __forceinline__ int row_floats() const { return head_dim + 4; }
  __device__ __forceinline__ int64_t slot_floats() const { return int64_t(rows) * row_floats(); }
  __device__ __forceinline__ float* rows_of(const Part& part, int index) const {
    const int64_t block = part.block(index);
    return index == 0 ? begun + block * slot_floats() : continued + block * slots * slot_floats();
  }
  __device__ __forceinline__ unsigned* flag_of(const Part& part, int index) const {
    return flags + 2 * part.block(index) + (index == 0 ? 0 : 1);
  }

  // Collective for a warp, before the block's results of the unit are stored: marks them as absent.
  __device__ __forceinline__ void clear(const Part& part) const {
    float* const g_rows = rows_of(part, part.index);
    const int used = part.begins() ? 1 : min(part.count, slots);
    for (int i = int(threadIdx.x % 32); i < used * (rows * row_floats() / 4); i += 32)
      st_relaxed(g_rows + 4 * i, {kAbsent, kAbsent, kAbsent, kAbsent});
  }
  // Collective for the same warp: the merging block may read.
  __device__ __forceinline__ void announce(const Part& part) const {
    __syncwarp();  // all lanes have cleared
    if (threadIdx.x % 32 == 0) st_release(flag_of(part, part.index), 1);
  }
  // Collective for a warp of the merging block: afterwards, parts that have not arrived read as absent.
  __device__ __forceinline__ void await_announcements(const Part& part) const {
    for (int i = int(threadIdx.x % 32); i < part.parts - 1; i += 32) {
      unsigned* const flag = flag_of(part, i);
      while (ld_acquire(flag) == 0) wait_for_blocks_before();
      *flag = 0;
    }
    __syncwarp();  // all lanes have looked
  }

  __device__ __forceinline__ void store(const Part& part, int slot, int row, int d, const Merged& x) const {
    float* const g_row = rows_of(part, part.index) + slot * slot_floats() + int64_t(row) * row_floats();
    st_relaxed(g_row + d, words({x.o.x, x.o.y, x.o.z, x.o.w}));
    if (d == 0) st_relaxed(g_row + head_dim, words({x.m, x.l, x.exact, 0.0f}));
  }
  // Saves a thread's state of a row's channels from one split to the next, and recalls it.
  __device__ __forceinline__ void remember(int row, int d, const Merged& x) const {
    float4* const g_own = own_of(row, d);
    g_own[0] = x.o;
    g_own[1] = make_float4(x.m, x.l, x.exact, 0.0f);
  }
  __device__ __forceinline__ Merged recall(int row, int d) const {
    const float4* const g_own = own_of(row, d);
    const float4 sums = g_own[1];
    return {sums.x, sums.y, sums.z, g_own[0]};
  }

  // All parts of a row, in the order of their keys, once they have arrived. kInSplits: the first part, then split by
  // split.
  template <bool kInSplits>
  __device__ __forceinline__ Merged merged(const Part& part, int row, int d) const {
    if constexpr (kInSplits)
      return merged_splits(part, row, d);
    else
      return merged_parts(part, row, d);
  }

 private:
  __device__ __forceinline__ float4* own_of(int row, int d) const {
    return reinterpret_cast<float4*>(own + (int64_t(blockIdx.x) * rows + row) * (2 * head_dim) + 2 * d);
  }

  __device__ __forceinline__ Merged merged_parts(const Part& part, int row, int d) const {
    constexpr int kAtOnce = 16;  // loads in flight
    const float* g_row = rows_of(part, 0) + int64_t(row) * row_floats() + d;
    const float* g_next = rows_of(part, 1) + int64_t(row) * row_floats() + d;
    const int64_t apart = part.apart * slot_floats();
    Merged all;
#pragma unroll 1
    for (int left = part.parts; left > 0; left -= kAtOnce) {
      RowSums sums[kAtOnce];
      float4 o[kAtOnce];
      while (!load<kAtOnce>(opaque_global(g_row), opaque_global(g_next), apart, d, left, sums, o))
        wait_for_blocks_before();
      all.add(sums, o);
      g_row = g_next + (kAtOnce - 1) * apart, g_next = g_row + apart;
    }
    return all;
  }

  __device__ __forceinline__ Merged merged_splits(const Part& part, int row, int d) const {
    constexpr int kAtOnce = 8;  // loads in flight
    const int64_t in_slot = int64_t(row) * row_floats();
    Merged all;
    while (!load_one(opaque_global(rows_of(part, 0) + in_slot), d, all)) wait_for_blocks_before();
#pragma unroll 1
    for (int first = 0; first < part.continued; first += kAtOnce) {
      Merged splits[kAtOnce];
      for (bool there = false; !there;) {
        there = true;
        int index = 1 + first / part.each, slot = first % part.each;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= part.continued) break;
          const float* const g_row = rows_of(part, index) + slot * slot_floats() + in_slot;
          there = load_one(opaque_global(g_row), d, splits[i]) && there;
          if (++slot == part.each) slot = 0, ++index;
        }
        if (!there) wait_for_blocks_before();
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < part.continued) all = all.followed_by(splits[i]);
    }
    return all;
  }

  // Has it arrived?
  __device__ __forceinline__ bool load_one(const float* g_row, int d, Merged& x) const {
    const float4 sums = floats_of(ld_relaxed(g_row + head_dim));
    x = {sums.x, sums.y, sums.z, floats_of(ld_relaxed(g_row + d))};
    return float_to_bits(x.m) != kAbsent && float_to_bits(x.o.x) != kAbsent;
  }
  // Have these parts, at most `left`, all arrived?
  template <int kAtOnce>
  __device__ __forceinline__ bool load(const float* g_row, const float* g_next, int64_t apart, int d, int left,
                                       RowSums (&sums)[kAtOnce], float4 (&o)[kAtOnce]) const {
    bool there = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sums[i] = {-infinity(), 0.0f, 0.0f, 0.0f};
      o[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (i < left) {
        const float4 x = floats_of(ld_relaxed(g_row + head_dim - d));
        sums[i] = {x.x, x.y, x.z, 0.0f};
        o[i] = floats_of(ld_relaxed(g_row));
      }
      g_row = g_next, g_next += apart;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      there = there && float_to_bits(sums[i].m) != kAbsent && float_to_bits(o[i].x) != kAbsent;
    return there;
  }
  // Replaces a NaN with the bits that mean absence by another NaN.
  __device__ static __forceinline__ Word4 words(const float4& x) {
    const uint32_t first = float_to_bits(x.x);
    return {first == kAbsent ? kNan : first, float_to_bits(x.y), float_to_bits(x.z), float_to_bits(x.w)};
  }
  __device__ static __forceinline__ float4 floats_of(const Word4& x) {
    return make_float4(bits_to_float(x.word[0]), bits_to_float(x.word[1]), bits_to_float(x.word[2]),
                       bits_to_float(x.word[3]));
  }
};

}  // namespace decode
}  // namespace qf
