// Which tile of Hopper's GEMM serves a problem, and of which tiles k is cut, into how many splits: what a model of the
// GPU takes for fastest. Host side, and without CUDA, so that a test can ask it (tests/emulated/test_gemm_host.py).
//
// Tiles that fill waves are whole. Of those that are left for a last wave, and of all where there is less than one, k
// may be cut, so that the wave has work for more of the GPU and takes a part of the time.
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
  int64_t whole;  // clusters' work that comes first and is not cut
};

constexpr int kMostSplits = 16, kLeastSteps = 4;  // steps: of a split
constexpr double kWorthIt = 0.99;                 // of a call's clocks: a last wave that saves less is not cut

constexpr int64_t count_of(int64_t all, int64_t each) { return (all + each - 1) / each; }

// Clusters' work without splits.
constexpr int64_t tiles_of(const Problem90& p, const Tile90& tile) {
  return count_of(p.m, int64_t(tile.rows) * tile.cluster) * count_of(p.n, tile.columns);
}

// Does every block of a cluster have rows? Else the other tile is better in any case.
constexpr bool fills_clusters(const Problem90& p, const Tile90& tile) { return p.m > tile.rows * (tile.cluster - 1); }

// May k of what is not whole be cut into so many? All splits must be at work at the same time, so that a bound on
// multiprocessors is one on the memory for partial sums. slots: clusters that run at the same time.
constexpr bool may_split(const Problem90& p, const Tile90& tile, int splits, int slots, int64_t whole) {
  return splits == 1 ||
         (splits <= kMostSplits && p.steps / splits >= kLeastSteps && (tiles_of(p, tile) - whole) * splits <= slots);
}

// Clocks from launch to the last result. whole: a multiple of slots.
inline double clocks_of(const Problem90& p, const Tile90& tile, int splits, int slots, int64_t whole) {
  constexpr double kPortBytes = 48, kL2Bytes = 3700, kMemoryBytes = 2400;  // a clock: to one multiprocessor; to all
  constexpr double kFixed = 4000, kMeet = 3000;  // launch, the first and the last bytes; where partial sums meet
  const auto at_most = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto larger = [](double a, double b) { return a > b ? a : b; };
  const double rows = double(at_most(p.m, tile.rows)), row_tiles = double(count_of(p.m, tile.rows));
  const double bytes = 128 * (rows + double(tile.columns) / tile.cluster);
  const auto waves = [&](int64_t units, int parts) {  // of so many units, each of one part of a tile's steps
    const double active = double(at_most(units, slots) * tile.cluster);
    const double from_memory = 128 * tile.columns * active / (row_tiles < active ? row_tiles : active);
    double step = larger(tile.clocks, larger(bytes / kPortBytes, active * bytes / kL2Bytes));
    step = larger(step, from_memory / kMemoryBytes);
    return double(count_of(units, slots)) * (double(count_of(p.steps, parts)) * step + kFixed);
  };
  // Every split writes its sums, and one block reads those of all. Where all tiles are cut, reading counts once: that
  // is the estimate by which splits of few rows were chosen when they were measured, and their bits depend on it.
  const int moved = whole > 0 ? 1 + splits : 2;
  const double meeting = splits > 1 ? kMeet + moved * rows * tile.columns * 4 / kPortBytes : 0;
  const int64_t rest = tiles_of(p, tile) - whole;
  return (whole > 0 ? waves(whole, 1) : 0) + (rest > 0 ? waves(rest * splits, splits) + meeting : 0);
}

// processors: multiprocessors of the GPU, 1 at least. pairs: clusters of large tiles that run on it at the same time,
// up to half as many. A wrong count costs nothing but time.
inline Choice90 choose_tile(const Problem90& p, int processors, int pairs) {
  Choice90 best = {false, 1, 0};
  double least = clocks_of(p, kSmallTile, 1, processors, 0);
  for (const bool large : {false, true}) {
    const Tile90& tile = large ? kLargeTile : kSmallTile;
    const int slots = large ? pairs : processors;
    if (slots < 1 || !fills_clusters(p, tile)) continue;
    for (int splits = 1; splits <= kMostSplits; ++splits) {
      if (!may_split(p, tile, splits, slots, 0)) continue;
      const double clocks = clocks_of(p, tile, splits, slots, 0);
      if (clocks < least) least = clocks, best = {large, splits, 0};
    }
  }
  // The last wave of large tiles. Small ones are for what memory bounds: fewer of them at a time have more of it each.
  if (pairs < 1 || !fills_clusters(p, kLargeTile)) return best;
  const int64_t whole = tiles_of(p, kLargeTile) / pairs * pairs;
  if (whole == 0) return best;
  const double uncut = clocks_of(p, kLargeTile, 1, pairs, whole);  // a last wave that is not full has shorter steps
  least = kWorthIt * (uncut < least ? uncut : least);
  for (int splits = 2; splits <= kMostSplits; ++splits) {
    if (!may_split(p, kLargeTile, splits, pairs, whole)) continue;
    const double clocks = clocks_of(p, kLargeTile, splits, pairs, whole);
    if (clocks < least) least = clocks, best = {true, splits, whole};
  }
  return best;
}

// Partial sums of any choice on any GPU of up to `most` multiprocessors, in bytes. How many pairs run there at the same
// time is not known: the last wave may be what any number of them leaves.
inline int64_t most_partial_bytes(const Problem90& p, int most) {
  int64_t bytes = 0;
  const auto add = [&](const Tile90& tile, int64_t units) {
    const int64_t own = units * tile.cluster * tile.rows * tile.columns * 4;
    if (own > bytes) bytes = own;
  };
  for (int splits = 2; splits <= kMostSplits; ++splits)
    if (may_split(p, kSmallTile, splits, most, 0)) add(kSmallTile, tiles_of(p, kSmallTile) * splits);
  if (!fills_clusters(p, kLargeTile)) return bytes;
  const int64_t tiles = tiles_of(p, kLargeTile);
  for (int slots = 1; slots <= most / kLargeTile.cluster; ++slots) {
    const int64_t rest = tiles % slots, longest = p.steps / kLeastSteps;
    int64_t splits = rest > 0 ? slots / rest : 0;
    splits = splits < longest ? splits : longest;
    splits = splits < kMostSplits ? splits : kMostSplits;
    if (splits > 1) add(kLargeTile, rest * splits);
  }
  return bytes;
}

}  // namespace gemm
}  // namespace qf
