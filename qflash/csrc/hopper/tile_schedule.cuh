// The order in which persistent blocks process the output tiles of a problem: `rows` tiles of each of `columns` columns
// (the heads of attention, the column tiles of a matrix product).
//
// Columns are processed in sections: all tiles of one section before any of the next, last rows first, columns
// innermost. Blocks that run concurrently then share what a section reads.
//
// Static: block b takes tiles b, b + blocks, b + 2 blocks ... Dynamic: a block takes its next tile from a counter in
// global memory when it is about to need it, so that tiles may differ in length. Which block takes which tile then
// depends on timing; the results do not.
#pragma once

#include <stdint.h>

#include "hopper/tile_counter.cuh"
#include "ptx/tid.cuh"

namespace qf {

// The threads that iterate over a block's tiles: one thread, or all lanes of a warp together.
struct OneThread {
  static constexpr bool kKeepsAddress = true;  // of the counter, in registers
  __device__ static __forceinline__ bool leads() { return true; }
  template <class Take>
  __device__ static __forceinline__ int once(Take take) {  // once for all of them
    return take();
  }
};
struct WholeWarp {
  static constexpr bool kKeepsAddress = false;
  __device__ static __forceinline__ bool leads() { return uint32_t(fresh_tid()) % 32 == 0; }
  template <class Take>
  __device__ static __forceinline__ int once(Take take) {
    int taken = 0;
    if (leads()) taken = take();
    return __shfl_sync(0xffffffffu, taken, 0);
  }
};

struct TileSchedule {
  int count, rows, columns, section;  // section: columns that are processed together
  bool dynamic;
  int counter;     // dynamic: index into tile_counters; -1: use `next`
  unsigned* next;  // 0 when the kernel starts

  static constexpr int kTooMany = 0x40000000;  // tiles: leaves room for blocks to count past the end

  struct Tile {
    int row, column;
  };

  __device__ __forceinline__ unsigned* take_from() const { return counter < 0 ? next : &tile_counters[counter]; }

  __device__ __forceinline__ Tile tile(int index) const {
    const int per_section = section * rows;
    const int s = index / per_section, rest = index - s * per_section;
    const int first = s * section, width = min(section, columns - first);
    const int row = rest / width;
    return {rows - 1 - row, first + rest - row * width};
  }

  // Calls visit(index) for every tile of this block, in order; the grid has `total` of them, possibly fewer than
  // `count`. wait_to_take(): returns when the next tile should be taken. Each block takes tiles until it gets one past
  // the end, which makes `total` increments in all: atomicInc has wrapped to 0 after the last.
  template <class By = OneThread, class Wait, class Visit>
  __device__ __forceinline__ void for_each(int total, Wait wait_to_take, Visit visit) const {
    unsigned* const kept = take_from();
    for (int index = blockIdx.x; index < total;) {
      visit(index);
      if (dynamic) {
        wait_to_take();
        index = fresh_blocks() +
                By::once([&] { return int(atomicInc(By::kKeepsAddress ? kept : take_from(), unsigned(total - 1))); });
      } else {
        index += fresh_blocks();
      }
    }
  }
};

// Host side. The row tiles of a section follow one another; section is clamped to 1 .. columns.
inline TileSchedule tile_schedule(int64_t rows, int64_t columns, int64_t section, bool dynamic) {
  constexpr int kTooMany = TileSchedule::kTooMany;
  TileSchedule schedule{};
  schedule.rows = int(rows);
  schedule.columns = columns < kTooMany ? int(columns) : kTooMany;
  schedule.section = int(section < 1 || columns < 1 ? 1 : section > schedule.columns ? schedule.columns : section);
  const int64_t count = rows * schedule.columns;
  schedule.count = count < kTooMany ? int(count) : kTooMany;
  schedule.dynamic = dynamic;
  schedule.counter = -1;
  return schedule;
}

}  // namespace qf
