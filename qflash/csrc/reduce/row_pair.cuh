// Two rows of the same length side by side, as gradients need them: a thread holds the same columns of both, wherever
// in a 16-byte word each of them starts.
#pragma once

#include "reduce/row.cuh"

namespace qf {

// Loads `share` of a row that is cut as another one, whose cut is `cut`. If its alignment differs, granules are
// assembled element by element.
template <class Element, int kVecs, class Team>
__device__ __forceinline__ void load_beside(RawShare<Element, kVecs>& share, const Element* g_row, const RowCut& cut,
                                            const Team& team, int first) {
  constexpr int kElements = kGranule<Element>;
  if (aligned_alike(g_row, cut)) {
    share.load(g_row, cut, team, first, 0.0f);
    return;
  }
  share.mine = first + team.rank() / 32 * (32 * kVecs) + team.rank() % 32;
  share.left = cut.granules - share.mine;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const Element* g_granule = g_row + cut.head + int64_t(share.mine + 32 * v) * kElements;
    float x[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = share.present(v) ? to_float(g_granule[i]) : 0.0f;
    share.raw[v] = pack_granule(x, g_row);
  }
  share.has_edge = first == 0 && team.rank() < cut.edges;
  share.edge = share.has_edge ? to_float(g_row[column_of_edge(cut, team.rank())]) : 0.0f;
}

// Calls see(x, y, column) for the elements of two shares from `column` on, granule by granule.
template <class Element, int kVecs, class Team, class See>
__device__ __forceinline__ void see_pair(const RawShare<Element, kVecs>& a, const RawShare<Element, kVecs>& b,
                                         const RowCut& cut, const Team& team, See see) {
  constexpr int kElements = kGranule<Element>;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    if (!a.present(v)) continue;
    float x[kElements], y[kElements];
    a.values(v, x);
    b.values(v, y);
    see(x, y, cut.head + (a.mine + 32 * v) * kElements);
  }
  if (!a.has_edge) return;
  float x[1] = {a.edge}, y[1] = {b.edge};
  see(x, y, column_of_edge(cut, team.rank()));
}

// finish(x, y, column) turns x, the elements of `a`, into results, which are stored to g_out.
template <class Element, int kVecs, class Team, class Finish>
__device__ __forceinline__ void store_pair(const RawShare<Element, kVecs>& a, const RawShare<Element, kVecs>& b,
                                           Element* g_out, const RowCut& cut, const Team& team, Finish finish) {
  const bool aligned = aligned_alike(g_out, cut);
  see_pair(a, b, cut, team, [&](auto& x, auto& y, int column) {
    constexpr int kCount = int(sizeof(x) / sizeof(float));
    finish(x, y, column);
    if constexpr (kCount == kGranule<Element>) {
      if (aligned) {
        st_streaming(g_out + column, pack_granule(x, g_out));
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) from_float(x[i], g_out[column + i]);
  });
}

}  // namespace qf
