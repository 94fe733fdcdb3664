// Distributes a row of a matrix over the threads of a team, at any start and any length.
//
//      row start                                                                row end
//         v                                                                        v
//      |..hhhh|granule 0|granule 1| ...  16-byte words, aligned ...     |granule n-1|ttt...|
//
// A granule is 16 aligned bytes wholly inside the row. A warp has 32 kVecs consecutive granules, and each of its lanes
// every 32nd of them: neighbouring lanes read and write neighbouring granules, and a thread's addresses differ by
// constants. The elements left at the two ends, fewer than two granules hold, are the row's edges: the team's first
// threads have one each. Nothing outside the row is accessed.
#pragma once

#include "common/elements.cuh"
#include "ptx/ldst.cuh"
#include "ptx/max.cuh"
#include "ptx/mov.cuh"

namespace qf {

template <class Element>
constexpr int kGranule = 16 / int(sizeof(Element));  // elements

// How a row is cut, given its alignment.
struct RowCut {
  int columns, head, edges, granules;
};

template <class Element>
__device__ __forceinline__ RowCut cut_row(const Element* g_row, int columns) {
  constexpr int kElements = kGranule<Element>;
  const int past = int(reinterpret_cast<uintptr_t>(g_row) % 16) / int(sizeof(Element));
  const int head = min(columns, (kElements - past) % kElements);
  return {columns, head, head + (columns - head) % kElements, (columns - head) / kElements};
}

__device__ __forceinline__ int column_of_edge(const RowCut& cut, int i) {
  return i < cut.head ? i : cut.columns - cut.edges + i;
}

__device__ __forceinline__ void unpack(const Word4& raw, float (&x)[4], const float*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = bits_to_float(raw.word[i]);
}
template <class Element>
__device__ __forceinline__ void unpack(const Word4& raw, float (&x)[8], const Element*) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = to_float(Element{uint16_t(raw.word[i])});
    x[2 * i + 1] = to_float(Element{uint16_t(raw.word[i] >> 16)});
  }
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, const F16*) { return cvt_rn_f16x2_f32(low, high); }
__device__ __forceinline__ uint32_t pack_pair(float low, float high, const BF16*) {
  return cvt_rn_bf16x2_f32(low, high);
}

__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, const F16*) { return max_f16x2(a, b); }
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b, const BF16*) { return max_bf16x2(a, b); }

// The largest number in some granules; NaN if all elements are NaN.
template <int kVecs>
__device__ __forceinline__ float largest_of(const Word4 (&raw)[kVecs], const float*) {
  float m = bits_to_float(raw[0].word[0]);
#pragma unroll
  for (int i = 1; i < 4 * kVecs; ++i) m = fmaxf(m, bits_to_float(raw[i / 4].word[i % 4]));
  return m;
}
template <int kVecs, class Element>
__device__ __forceinline__ float largest_of(const Word4 (&raw)[kVecs], const Element* type) {
  uint32_t pair = raw[0].word[0];
#pragma unroll
  for (int i = 1; i < 4 * kVecs; ++i) pair = max_pair(pair, raw[i / 4].word[i % 4], type);
  return fmaxf(to_float(Element{uint16_t(pair)}), to_float(Element{uint16_t(pair >> 16)}));
}

__device__ __forceinline__ Word4 pack_granule(const float (&x)[4], const float*) {
  Word4 raw;
#pragma unroll
  for (int i = 0; i < 4; ++i) raw.word[i] = float_to_bits(x[i]);
  return raw;
}
template <class Element>
__device__ __forceinline__ Word4 pack_granule(const float (&x)[8], const Element* type) {
  Word4 raw;
#pragma unroll
  for (int i = 0; i < 4; ++i) raw.word[i] = pack_pair(x[2 * i], x[2 * i + 1], type);
  return raw;
}

// Columns column .. column + kCount - 1 of a vector that all rows share, or `otherwise` if there is none. kAligned:
// whether its granules are aligned as the row's are. It is tested by the caller: for a test here, the compiler
// predicates both paths, and every thread steps through the loads that it does not execute.
template <bool kAligned, class Element, int kCount>
__device__ __forceinline__ void load_columns(const Element* g_vector, int column, float otherwise, float (&y)[kCount]) {
#pragma unroll
  for (float& element : y) element = otherwise;
  if (!g_vector) return;
  if constexpr (kAligned && kCount == kGranule<Element>) {
    unpack(ld_constant(g_vector + column), y, g_vector);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = to_float(g_vector[column + i]);
  }
}

template <int kCount>
__device__ __forceinline__ float tree_sum(const float (&x)[kCount]) {
  float sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = x[i];
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// A thread's share of a row, or of a piece of a long one, in its memory format: up to kVecs granules and one edge.
// 16-bit elements take half the registers that floats do.
template <class Element, int kVecs>
struct RawShare {
  static constexpr int kElements = kGranule<Element>;
  Word4 raw[kVecs];
  float edge;
  int mine, left;  // the thread's first granule; granules of the row from it on
  bool has_edge;   // whether `edge` is part of the row

  __device__ __forceinline__ bool present(int v) const { return 32 * v < left; }

  // Loads the team's granules from `first` on, and with granule 0 the edges; `fill` where there are none. All loads are
  // issued before the first of them is used.
  template <class Team>
  __device__ __forceinline__ void load(const Element* g_row, const RowCut& cut, const Team& team, int first,
                                       float fill) {
    mine = first + team.rank() / 32 * (32 * kVecs) + team.rank() % 32;
    left = cut.granules - mine;
    const Element* g_mine = g_row + cut.head + int64_t(mine) * kElements;
    if (present(kVecs - 1)) {  // nearly always: no fill, no tests
#pragma unroll
      for (int v = 0; v < kVecs; ++v) raw[v] = ld_no_allocate(g_mine + 32 * v * kElements);
    } else {
      float filled[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) filled[i] = fill;
      const Word4 nothing = pack_granule(filled, g_row);
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
        raw[v] = v + 1 < kVecs && present(v) ? ld_no_allocate(g_mine + 32 * v * kElements) : nothing;
    }
    has_edge = first == 0 && team.rank() < cut.edges;
    edge = fill;
    if (has_edge) edge = to_float(g_row[column_of_edge(cut, team.rank())]);
  }

  __device__ __forceinline__ void values(int v, float (&y)[kElements]) const {
    unpack(raw[v], y, static_cast<const Element*>(nullptr));
  }

  // Includes the fill.
  __device__ __forceinline__ float largest() const {
    return fmaxf(edge, largest_of(raw, static_cast<const Element*>(nullptr)));
  }

  // The number of elements that are part of the row.
  __device__ __forceinline__ int count() const {
    return kElements * min(kVecs, max(0, left + 31) / 32) + int(has_edge);
  }

  // Multiplies every element by a power of two.
  __device__ __forceinline__ void scale(float unit) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      float x[kElements];
      values(v, x);
#pragma unroll
      for (float& element : x) element *= unit;
      raw[v] = pack_granule(x, static_cast<const Element*>(nullptr));
    }
    edge *= unit;
  }

  // Drops unpacked values, which the compiler would otherwise keep in registers until their next use.
  __device__ __forceinline__ void forget_values() {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[v].word[i] = fresh(raw[v].word[i]);
  }
};

// The same as floats, which can be modified.
template <class Element, int kVecs>
struct RowShare {
  static constexpr int kElements = kGranule<Element>;
  float x[kVecs][kElements], edge;
  int mine, left;
  bool has_edge;

  __device__ __forceinline__ bool present(int v) const { return 32 * v < left; }

  template <class Team>
  __device__ __forceinline__ void load(const Element* g_row, const RowCut& cut, const Team& team, int first,
                                       float fill) {
    RawShare<Element, kVecs> share;
    share.load(g_row, cut, team, first, fill);
    edge = share.edge, mine = share.mine, left = share.left, has_edge = share.has_edge;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) share.values(v, x[v]);
  }

  __device__ __forceinline__ void values(int v, float (&y)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) y[i] = x[v][i];
  }

  // Replaces every element x of the row by change(x); the fill stays.
  template <class Change>
  __device__ __forceinline__ void change_present(Change change) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      if (present(v)) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[v][i] = change(x[v][i]);
      }
    if (has_edge) edge = change(edge);
  }

  // Likewise for every element and the fill, without a branch.
  template <class Change>
  __device__ __forceinline__ void change_all(Change change) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[v][i] = change(x[v][i]);
    edge = change(edge);
  }

  __device__ __forceinline__ float largest() const {
    float m = edge;
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < kElements; ++i) m = fmaxf(m, x[v][i]);
    return m;
  }

  // Includes the fill.
  __device__ __forceinline__ float sum() const {
    float total = edge;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) total += tree_sum(x[v]);
    return total;
  }
};

// Whether the granules of a row that is cut like this are also aligned to 16 bytes in another row.
template <class Element>
__device__ __forceinline__ bool aligned_alike(const Element* g_other, const RowCut& cut) {
  return reinterpret_cast<uintptr_t>(g_other + cut.head) % 16 == 0;
}

// finish(y, column) turns a share's elements y from `column` on into results, which are stored to g_out. kAligned:
// whether granules are aligned there as in x, tested once per row instead of once per granule.
template <bool kAligned, template <class, int> class Share, class Element, int kVecs, class Team, class Finish>
__device__ __forceinline__ void store_share_at(const Share<Element, kVecs>& share, Element* g_out, const RowCut& cut,
                                               const Team& team, Finish finish) {
  constexpr int kElements = kGranule<Element>;
  const int column = cut.head + share.mine * kElements;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (!share.present(v)) continue;
    float y[kElements];
    share.values(v, y);
    finish(y, column + 32 * v * kElements);
    Element* g_granule = g_out + column + 32 * v * kElements;
    if (kAligned) {
      st_streaming(g_granule, pack_granule(y, g_out));
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) from_float(y[i], g_granule[i]);
    }
  }
  if (!share.has_edge) return;
  const int at = column_of_edge(cut, team.rank());
  float y[1] = {share.edge};
  finish(y, at);
  from_float(y[0], g_out[at]);
}

template <template <class, int> class Share, class Element, int kVecs, class Team, class Finish>
__device__ __forceinline__ void store_share(const Share<Element, kVecs>& share, Element* g_out, const RowCut& cut,
                                            const Team& team, Finish finish) {
  if (aligned_alike(g_out, cut)) {
    store_share_at<true>(share, g_out, cut, team, finish);
  } else {
    store_share_at<false>(share, g_out, cut, team, finish);
  }
}

}  // namespace qf
