// Which threads and registers serve rows of a length: the one choice that softmax, layer_norm and cross_entropy share.
//
//   columns        team     a thread holds
//   .. 1024        a warp   1, 2, 4 or 8 granules of 16 bytes, as few as will do
//   .. 32768       a block  32 elements: as many threads as that takes
//   more           a block  16 elements of a piece of the row at a time
#pragma once

#include "reduce/row.cuh"
#include "reduce/row_team.cuh"

namespace qf {

constexpr int kShareElements = 32;

// kWhole: a thread's share is all it ever sees of the row.
template <class Team_, int kVecs_, bool kWhole_>
struct RowShape {
  using Team = Team_;
  static constexpr int kVecs = kVecs_;
  static constexpr bool kWhole = kWhole_;
};

// run(shape, threads per block) for rows of `columns`; `long_threads`: of a block on a row that does not fit registers.
template <class Element, class Run>
inline int with_row_shape(int64_t columns, int long_threads, Run run) {
  constexpr int kElements = kGranule<Element>, kMost = kShareElements / kElements, kWarpThreads = 32 * WarpTeam::kWarps;
  if (columns <= 32 * kElements) return run(RowShape<WarpTeam, 1, true>{}, kWarpThreads);
  if (columns <= 32 * kElements * 2) return run(RowShape<WarpTeam, 2, true>{}, kWarpThreads);
  if (columns <= 32 * kElements * 4) return run(RowShape<WarpTeam, 4, true>{}, kWarpThreads);
  if (columns <= 32 * kShareElements) return run(RowShape<WarpTeam, kMost, true>{}, kWarpThreads);
  const int64_t threads = (columns + kShareElements - 1) / kShareElements;
  if (threads <= BlockTeam::kMostThreads) return run(RowShape<BlockTeam, kMost, true>{}, int(threads + 31) / 32 * 32);
  return run(RowShape<BlockTeam, kMost / 2, false>{}, long_threads);
}

template <class Team>
inline RowGrid row_grid(int64_t rows) {
  return {0, (rows + Team::kRowsPerBlock - 1) / Team::kRowsPerBlock};
}

}  // namespace qf
