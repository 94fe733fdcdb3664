// The tile scheduler: which work a cluster of blocks does, in which order. It is persistent: cluster c processes work
// c, c + clusters, c + 2 clusters and so on. A unit of work is a column of kCluster tiles, or a split of their steps
// along k. Whole columns come first, then the splits of the others: the last wave is cut (gemm/policy.h).
//
// Concurrent clusters should share what they read: work covers a band of kBandRows rows of clusters, column by column,
// so that a hundred tiles read about as many bytes of x as of w, and both stay in the L2 cache.
#pragma once

#include "gemm/wgmma/config.cuh"
#include "ptx/tid.cuh"

namespace qf {
namespace gemm {
namespace wgmma {

struct Work {
  int row0, column0;      // of the cluster's first tile
  int first_step, steps;  // along k
  int tile, split;        // tile: index among all tiles
  int splits;             // that this tile is cut into: 1, or those of the Walk
};

struct Walk {
  int row_tiles, column_tiles;  // counted in clusters; in tiles
  int steps, splits;            // along k, of a whole tile; splits of a cut tile, each of at least one step
  int whole, count;             // tiles that come first and are not cut; units of work

  static constexpr int kTooMany = 0x40000000;  // leaves room: clusters count past `count`
  static constexpr int kShortSteps = 16;

  template <class Config>
  __device__ __forceinline__ Work work(int index) const {
    int tile = index, split = 0, parts = 1;
    if (index >= whole) {
      const int cut = (index - whole) / splits;
      tile = whole + cut, split = index - whole - cut * splits, parts = splits;
    }
    const int band = tile / (Config::kBandRows * column_tiles), first = band * Config::kBandRows;
    const int rows = min(Config::kBandRows, row_tiles - first), within = tile - first * column_tiles;
    const int column = within / rows, row = first + within - column * rows;
    const int begin = steps * split / parts, end = steps * (split + 1) / parts;  // up to 2^25 steps: no overflow
    const int row0 = row * Config::kCluster * Config::kRows;
    return {row0, column * Config::kOutColumns, begin, end - begin, tile, split, parts};
  }

  // Is the whole launch so short that the start of the next one is a large part of it? Then the next may start when all
  // loads are in flight. After longer launches it must not: one of 58 us, followed by others like it, would take 69.
  template <class Config>
  __device__ __forceinline__ bool is_short() const {
    return whole == 0 && steps <= kShortSteps * splits && count <= int(gridDim.x) / Config::kCluster;
  }

  // Calls visit(Work) for all work of this block's cluster, in order.
  template <class Config, class Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    for (int index = int(blockIdx.x) / Config::kCluster; index < count; index += fresh_blocks() / Config::kCluster)
      visit(work<Config>(index));
  }
};

// Host side, as is the rest. Steps along k of a whole tile: with two chained weights, whole steps of each.
template <class Config>
inline int64_t steps_of(const QfLinearParams& p) {
  return (p.k + Config::kStep - 1) / Config::kStep * (chains<Config>(p) ? 2 : 1);
}

// splits: 1 .. kMostSplits, and at most the number of steps, unless that is 0. The tiles after the first
// `whole` are cut; both are counted in clusters.
template <class Config>
inline Walk walk_of(const QfLinearParams& p, int splits, int64_t whole) {
  const auto count_of = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  const int64_t rows = count_of(p.m, Config::kRows * Config::kCluster), columns = count_of(p.n, Config::kOutColumns);
  const int64_t tiles = rows * columns, uncut = whole < tiles ? whole : tiles, count = uncut + (tiles - uncut) * splits;
  if (count >= Walk::kTooMany) return {int(rows), int(columns), int(steps_of<Config>(p)), splits, 0, Walk::kTooMany};
  return {int(rows), int(columns), int(steps_of<Config>(p)), splits, int(uncut), int(count)};
}

}  // namespace wgmma
}  // namespace gemm
}  // namespace qf
