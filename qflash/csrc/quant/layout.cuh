// How a tensor to be quantized is distributed over threads.
//
// A thread holds eight neighbouring channels of a token at a time, in each of its places (kHeld). A token is shared by
// `row_lanes` threads, the power of two that its channels need (at most a whole block, which then iterates along the
// token); a unit of work by `unit_lanes`, one or more times as many. A unit is one of
//   kToken       kHeld tokens, each with a scale of its own
//   kGroup       tokens that share a scale: a whole group if its scale is computed on the way, part of one if it was
//                computed before
//   kWideToken   one token of more than kWide channels; a thread holds kHeld pieces of it at a time
// Heads are the fastest index of a unit, so that the warps of a block read neighbouring memory and share cosines.
#pragma once

#include "common/limits.h"
#include "qflash_ops.h"

namespace qf {

constexpr int kQuantizeThreads = 256;
constexpr int kWide = 8 * kQuantizeThreads;  // channels that a block holds at a time
constexpr int kMeanChunk = 64;               // tokens summed in float32 before they are added to a float64 sum

enum class Unit { kToken, kGroup, kWideToken };

// How memory is read and written: eight channels at a time; the same, with rotation; or one by one, rotated or not, if
// strides, head_dim or rope tables allow nothing else.
enum class Moves { kVectors, kRotated, kSingly };

// Places of a thread for eight channels each: many in the simplest case, few if registers have to hold more.
constexpr int kMostPlaces = 8, kLeastPlaces = 4;
template <Unit kUnit, Moves kMoves>
constexpr int kPlaces = kMoves == Moves::kVectors && kUnit != Unit::kWideToken ? kMostPlaces : kLeastPlaces;

// n / divisor for n below 2^31, by a multiplication.
struct Divider {
  uint32_t divisor, factor;
  int shift;

  __device__ __forceinline__ uint32_t operator()(uint32_t n) const { return uint32_t(uint64_t(n) * factor >> shift); }
};

// factor = 2^shift / divisor rounded up, with 2^(shift - 31) the power of two at or above divisor: the excess, below
// divisor / 2^shift per unit of n, stays below 1 / divisor up to n = 2^31.
inline Divider divider(uint32_t divisor) {
  int log = 0;
  while ((uint64_t(1) << log) < divisor) ++log;
  const uint64_t power = uint64_t(1) << (31 + log);
  return {divisor, uint32_t((power + divisor - 1) / divisor), 31 + log};
}

struct Layout {
  int row_lanes, unit_lanes, log_row, log_unit;
  int log_slots;         // units side by side in a block
  int teams, log_teams;  // unit_lanes / row_lanes: tokens of a unit that are held at once
  int group;             // tokens that are distributed together
  int scales;            // of a head, if there are any
  Divider parts;         // units of a group
  Divider heads;
  Divider tiles;   // blocks of one sequence
  uint32_t units;  // of one sequence
};

inline int64_t ceil_of(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

// Threads that share a token.
inline int row_lanes(int head_dim) {
  int lanes = 1;
  while (lanes < kQuantizeThreads && 8 * lanes < head_dim) lanes *= 2;
  return lanes;
}

// Distributes `outer` units times heads. group, unit_lanes and row_lanes are set.
inline void deal(Layout& layout, int64_t outer, int heads) {
  const auto log2 = [](int power) { return 31 - __builtin_clz(power); };
  layout.log_row = log2(layout.row_lanes);
  layout.log_unit = log2(layout.unit_lanes);
  layout.log_slots = log2(kQuantizeThreads / layout.unit_lanes);
  layout.teams = layout.unit_lanes / layout.row_lanes;
  layout.log_teams = log2(layout.teams);
  layout.heads = divider(heads > 0 ? heads : 1);
  const int64_t units = outer * heads, tiles = ceil_of(units, int64_t(1) << layout.log_slots);
  layout.units = uint32_t(units);
  layout.tiles = divider(tiles > 0 && tiles < kMostBlocks ? uint32_t(tiles) : 1);
}

// Blocks of one sequence.
inline int64_t tiles_of(int64_t outer, const Layout& layout, int heads) {
  return ceil_of(outer * heads, int64_t(1) << layout.log_slots);
}

// Whether `outer` units times heads can be distributed: indices of units and of blocks fit 31 bits, with room for a
// last block's surplus.
inline bool fits(int64_t outer, const Layout& layout, int heads, int batch) {
  const int64_t most = kMostBlocks - kQuantizeThreads;
  return outer * heads <= most && tiles_of(outer, layout, heads) * batch <= most;
}

// May x, in elements of `bytes`, and values be read and written eight channels at a time?
inline bool vectorises8(const QfTensor& x, const QfTensor& values, int head_dim, int bytes) {
  const int step = bytes == 4 ? 4 : 8;
  const auto strides = [](const QfTensor& t, int n) {
    return t.stride_b % n == 0 && t.stride_t % n == 0 && t.stride_h % n == 0;
  };
  return head_dim % 8 == 0 && strides(x, step) && strides(values, 8) && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(values.data) % 8 == 0;
}

}  // namespace qf
