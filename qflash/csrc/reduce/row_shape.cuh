// How many threads and registers process a row of a given length: the choice that softmax, layer_norm and cross_entropy
// share.
//
//   columns                        team     a thread holds
//   .. what kMost granules take    a warp   1, 2, 4 or 8 granules of 16 bytes, as few as suffice
//   .. 32768                       a block  kMost granules: as many threads as that takes
//   more                           a block  kLong granules of a piece of the row at a time
#pragma once

#include "reduce/row.cuh"
#include "reduce/row_team.cuh"

namespace qf {

constexpr int kWholeColumns = 32768;  // of the longest rows that stay in registers

// kWhole: a thread's share is all it sees of the row. kMostThreads: of a block; fewer threads have more registers each.
template <class Team_, int kVecs_, bool kWhole_, int kMostThreads_ = Team_::kMostThreads>
struct RowShape {
  using Team = Team_;
  static constexpr int kVecs = kVecs_;
  static constexpr bool kWhole = kWhole_;
  static constexpr int kMostThreads = kMostThreads_;
};

// Calls run(shape, threads per block) for rows of `columns`. kMost: 4 or 8 granules per thread; kLong, kLongThreads:
// for rows that do not fit registers; kWhole: columns of the longest row that does.
template <class Element, int kMost, int kLong, int kLongThreads, int kWhole = kWholeColumns, class Run>
inline int with_row_shape(int64_t columns, Run run) {
  constexpr int kElements = kGranule<Element>, kShare = kMost * kElements, kWarpThreads = 32 * WarpTeam::kWarps;
  constexpr int kWholeThreads = kWhole / kShare;
  static_assert(kMost >= 4 && kWholeThreads <= BlockTeam::kMostThreads, "a whole row fits a block's registers");
  if (columns <= 32 * kElements) return run(RowShape<WarpTeam, 1, true>{}, kWarpThreads);
  if (columns <= 32 * kElements * 2) return run(RowShape<WarpTeam, 2, true>{}, kWarpThreads);
  if (columns <= 32 * kElements * 4) return run(RowShape<WarpTeam, 4, true>{}, kWarpThreads);
  if (columns <= 32 * kShare) return run(RowShape<WarpTeam, kMost, true>{}, kWarpThreads);
  const int threads = int(min(columns, int64_t(kWhole)) + 32 * kShare - 1) / (32 * kShare) * 32;
  if (columns <= kWhole) return run(RowShape<BlockTeam, kMost, true, kWholeThreads>{}, threads);
  return run(RowShape<BlockTeam, kLong, false, kLongThreads>{}, kLongThreads);
}

}  // namespace qf
