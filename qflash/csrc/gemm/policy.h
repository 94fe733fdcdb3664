// Which tile of Hopper's GEMM serves a problem, and into how many splits its k is cut: what a model of the GPU takes
// for fastest. Host side, and without CUDA, so that a test can ask it (tests/unit/test_gemm_policy.py).
//
// The model: all multiprocessors run steps of 128 bytes of k at the pace of what is slowest, for one wave of tiles
// after another. It is an estimate, in clocks, from a few limits of an H200; nothing in it is exact, and nothing but
// speed depends on it.
#pragma once

#include <stdint.h>

#include <initializer_list>

namespace qf {
namespace gemm {

struct Tile90 {
  int rows, columns;  // of sums
  int cluster;        // blocks that share columns of w
  int clocks;         // that a step takes if its bytes are there: tensor cores, or shared memory where that is slower
};
constexpr Tile90 kLargeTile = {128, 256, 2, 1024};
constexpr Tile90 kSmallTile = {64, 128, 1, 384};

struct Problem90 {
  int64_t m, n;   // of the sums: with SwiGLU n counts columns of both products
  int64_t steps;  // along k
};

struct Choice90 {
  bool large;
  int splits;
};

constexpr int kMostSplits = 16, kLeastSteps = 4;  // steps: of a split

constexpr int64_t count_of(int64_t all, int64_t each) { return (all + each - 1) / each; }

// Clusters' work without splits.
constexpr int64_t tiles_of(const Problem90& p, const Tile90& tile) {
  return count_of(p.m, int64_t(tile.rows) * tile.cluster) * count_of(p.n, tile.columns);
}

// Does every block of a cluster have rows? Else the other tile is better in any case.
constexpr bool fills_clusters(const Problem90& p, const Tile90& tile) { return p.m > tile.rows * (tile.cluster - 1); }

// May k be cut into so many? All splits must be at work at the same time, so that a bound on multiprocessors is one on
// the memory for partial sums.
constexpr bool may_split(const Problem90& p, const Tile90& tile, int splits, int processors) {
  return splits == 1 || (splits <= kMostSplits && p.steps / splits >= kLeastSteps &&
                         tiles_of(p, tile) * splits <= processors / tile.cluster);
}

// Clocks from launch to the last result.
inline double clocks_of(const Problem90& p, const Tile90& tile, int splits, int processors) {
  constexpr double kPortBytes = 48, kL2Bytes = 3700, kMemoryBytes = 2400;  // a clock: to one multiprocessor; to all
  constexpr double kFixed = 4000, kMeet = 3000;  // launch, the first and the last bytes; where partial sums meet
  const auto at_most = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto larger = [](double a, double b) { return a > b ? a : b; };
  const int64_t units = tiles_of(p, tile) * splits, slots = processors / tile.cluster;
  const double active = double(at_most(units, slots) * tile.cluster);
  const double rows = double(at_most(p.m, tile.rows)), row_tiles = double(count_of(p.m, tile.rows));
  const double bytes = 128 * (rows + double(tile.columns) / tile.cluster);
  const double from_memory = 128 * tile.columns * active / (row_tiles < active ? row_tiles : active);
  double step = larger(tile.clocks, larger(bytes / kPortBytes, active * bytes / kL2Bytes));
  step = larger(step, from_memory / kMemoryBytes);
  const double meeting = splits > 1 ? kMeet + 2 * rows * tile.columns * 4 / kPortBytes : 0;
  return double(count_of(units, slots)) * (double(count_of(p.steps, splits)) * step + kFixed) + meeting;
}

// processors: multiprocessors of the GPU, 1 at least.
inline Choice90 choose_tile(const Problem90& p, int processors) {
  Choice90 best = {false, 1};
  double least = clocks_of(p, kSmallTile, 1, processors);
  for (const bool large : {false, true}) {
    const Tile90& tile = large ? kLargeTile : kSmallTile;
    if (processors < tile.cluster || !fills_clusters(p, tile)) continue;
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      if (!may_split(p, tile, splits, processors)) continue;
      const double clocks = clocks_of(p, tile, splits, processors);
      if (clocks < least) least = clocks, best = {large, splits};
    }
  }
  return best;
}

// Partial sums of any choice on any GPU of up to `most` multiprocessors, in bytes.
inline int64_t most_partial_bytes(const Problem90& p, int most) {
  int64_t bytes = 0;
  for (const Tile90& tile : {kSmallTile, kLargeTile})
    for (int splits = 2; splits <= kMostSplits; ++splits) {
      const int64_t own = tiles_of(p, tile) * splits * tile.cluster * tile.rows * tile.columns * 4;
      if (fills_clusters(p, tile) && may_split(p, tile, splits, most) && own > bytes) bytes = own;
    }
  return bytes;
}

}  // namespace gemm
}  // namespace qf
