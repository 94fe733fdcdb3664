// Selects a problem's tile of Hopper's GEMM, the tiles whose k is cut, and the number of splits: the choice that a
// model of the GPU estimates to be fastest. Host side, and without CUDA, so that a test can call it
// (tests/emulated/test_gemm_host.py).
//
// Tiles of full waves are whole. For those left to a last wave, and for all if there is less than one wave, k may be
// cut, so that the wave occupies more of the GPU and takes a fraction of the time.
//
// The model: all SMs run steps of 128 bytes of k at the rate of the slowest resource, wave after wave of tiles. It is
// an estimate, in cycles, from a few limits of an H200; nothing in it is exact. Speed depends on it and, through the
// splits, the last bits of floating-point results.
#pragma once

#include <stdint.h>

#include <initializer_list>

namespace qf {
namespace gemm {

struct Tile90 {
  int rows, columns;  // of accumulators
  int cluster;        // blocks that share columns of w
  int clocks;         // of a step whose bytes have arrived: by tensor cores, or by shared memory where that is slower
};
constexpr Tile90 kLargeTile = {128, 256, 2, 1024};
constexpr Tile90 kSmallTile = {64, 128, 1, 384};

struct Problem90 {
  int64_t m, n;   // of accumulators: with SwiGLU n counts columns of both products
  int64_t steps;  // along k
};

struct Choice90 {
  bool large;
  int splits;
  int64_t whole;  // tiles, counted in clusters, that come first and are not cut
};

constexpr int kMostSplits = 16, kLeastSteps = 4;  // steps: of a split
constexpr double kWorthIt = 0.99;                 // of a call's cycles: a last wave that saves less is not cut

constexpr int64_t count_of(int64_t all, int64_t each) { return (all + each - 1) / each; }

// Work without splits: tiles, counted in clusters.
constexpr int64_t tiles_of(const Problem90& p, const Tile90& tile) {
  return count_of(p.m, int64_t(tile.rows) * tile.cluster) * count_of(p.n, tile.columns);
}

// Does every block of a cluster have rows? Otherwise the other tile is better in any case.
constexpr bool fills_clusters(const Problem90& p, const Tile90& tile) { return p.m > tile.rows * (tile.cluster - 1); }

// May k of tiles that are not whole be cut into `splits`? All splits must run concurrently, so that a bound on the
// number of SMs bounds the memory for partial results. slots: clusters that run concurrently.
constexpr bool may_split(const Problem90& p, const Tile90& tile, int splits, int slots, int64_t whole) {
  return splits == 1 ||
         (splits <= kMostSplits && p.steps / splits >= kLeastSteps && (tiles_of(p, tile) - whole) * splits <= slots);
}

// Cycles from launch to the last result. whole: a multiple of slots.
inline double clocks_of(const Problem90& p, const Tile90& tile, int splits, int slots, int64_t whole) {
  constexpr double kPortBytes = 48, kL2Bytes = 3700, kMemoryBytes = 2400;  // per cycle: to one SM; to all
  constexpr double kFixed = 4000, kMeet = 3000;  // launch, first and last bytes; reduction of splits
  const auto at_most = [](int64_t a, int64_t b) { return a < b ? a : b; };
  const auto larger = [](double a, double b) { return a > b ? a : b; };
  const double rows = double(at_most(p.m, tile.rows)), row_tiles = double(count_of(p.m, tile.rows));
  const double bytes = 128 * (rows + double(tile.columns) / tile.cluster);
  const auto waves = [&](int64_t units, int parts) {  // of `units`, each with 1 / parts of a tile's steps
    const double active = double(at_most(units, slots) * tile.cluster);
    const double from_memory = 128 * tile.columns * active / (row_tiles < active ? row_tiles : active);
    double step = larger(tile.clocks, larger(bytes / kPortBytes, active * bytes / kL2Bytes));
    step = larger(step, from_memory / kMemoryBytes);
    return double(count_of(units, slots)) * (double(count_of(p.steps, parts)) * step + kFixed);
  };
  // Every split writes its partial results, and one block reads those of all. Where all tiles are cut, reading counts
  // once: this estimate chose the splits of few rows when they were measured, and their bits depend on it.
  const int moved = whole > 0 ? 1 + splits : 2;
  const double meeting = splits > 1 ? kMeet + moved * rows * tile.columns * 4 / kPortBytes : 0;
  const int64_t rest = tiles_of(p, tile) - whole;
  return (whole > 0 ? waves(whole, 1) : 0) + (rest > 0 ? waves(rest * splits, splits) + meeting : 0);
}

// processors: SMs of the GPU, at least 1. pairs: clusters of large tiles that run on it concurrently, up to half as
// many. A wrong count costs time, and may change the splits, and so those bits.
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
  // The last wave of large tiles. Small ones are bound by memory: fewer concurrent ones get more bandwidth each.
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

// The most bytes of partial results of any choice on any GPU of up to `most` SMs. How many pairs run there concurrently
// is not known: the last wave may be what any number of them leaves.
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
