// Two threads that bring work to the others: one describes the work tiles, one copies their rows and columns.
#pragma once

#include <cuda.h>

#include "attn/wgmma/backward/shared_memory.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace wgmma {
namespace backward {

struct TensorMaps {
  CUtensorMap first_rows, second_rows, first_columns, second_columns;
};

// Looks the counter of work tiles up each time it takes one: the address would take registers meanwhile.
struct OneOfFewRegisters : OneThread {
  static constexpr bool kKeepsAddress = false;
};

template <class Config>
__device__ __forceinline__ void describe_work(const QfAttnParams& p, const TileSchedule& schedule,
                                              const SharedMemory<Config>& s) {
  RingPosition<Config::kWorkTiles> at;
  uint32_t parity = 0;
  const auto wait_to_take = [&] {
    mbarrier_wait(s.next_tile, parity);
    parity ^= 1;
  };
  schedule.for_each<OneOfFewRegisters>(schedule.count, wait_to_take, [&](int index) {
    at.wait_empty(*s.work_ring);
    WorkTile<Config>* const work = &s.work[at.stage()];
    work->fill(p, schedule.tile(index), schedule.rows, *s.faults);
    // From memory: there are not registers enough to remember all of it.
    reinterpret_cast<WorkTile<Config>*>(opaque_shared(reinterpret_cast<char*>(work)))->complete();
    at.fill(*s.work_ring);
    at.advance();
  });
  at.wait_empty(*s.work_ring);
  s.work[at.stage()].tiles = -1;
  s.work[at.stage()].unserved = false;
  at.fill(*s.work_ring);
}

// The first and the second operand of some tokens into the next empty stage; it is full when all bytes have arrived.
template <class Tile, int kStages>
__device__ __forceinline__ void load_pair(RingPosition<kStages>& at, Ring<kStages>& ring, char* s_first, char* s_second,
                                          const CUtensorMap& first, const CUtensorMap& second, int row, int head,
                                          int b) {
  Mbarrier* const full = &ring.full[at.stage()];
  const int offset = at.stage() * Tile::kBytes;
  at.wait_empty(ring);
  mbarrier_arrive_expect(full, 2 * Tile::kBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kCount; ++panel) {
    const int to = offset + panel * Tile::kPanelBytes, column = panel * Tile::kPanelColumns;
    copy_box(s_first + to, &first, column, row, head, b, full);
    copy_box(s_second + to, &second, column, row, head, b, full);
  }
  at.advance();
}

// As far ahead as there are empty stages.
template <class Config>
__device__ __forceinline__ void produce(const QfAttnParams& p, const TileSchedule& schedule, const TensorMaps& maps,
                                        const SharedMemory<Config>& s) {
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<1> rows_at;
  RingPosition<Config::kStages> columns_at;
  for (;; work_at.release(*s.work_ring), work_at.advance()) {
    work_at.wait_full(*s.work_ring);
    const WorkTile<Config>& work = s.work[work_at.stage()];
    const int tiles = work.tiles;
    if (tiles < 0) return;
    // The later the next work tile is taken, the better for balance; but not so late that somebody waits for it.
    constexpr int kAhead = 3;  // tiles of columns
    const auto let_take = [&] {
      if (schedule.dynamic) mbarrier_arrive(s.next_tile);
    };
    int left = tiles * work.heads;
    if (left <= kAhead) let_take();
    if (left == 0) continue;
    const int b = p.cu_seqlens_q ? 0 : work.b, first_column = int(work.first_column());
    load_pair<typename Config::RowTile>(rows_at, *s.row_ring, s.first_rows, s.second_rows, maps.first_rows,
                                        maps.second_rows, int(work.first_row()), work.row_head, b);
    for (int head = work.column_head; left > 0; ++head)
      for (int n = 0; n < tiles; ++n, --left) {
        if (left == kAhead && tiles * work.heads > kAhead) let_take();
        load_pair<typename Config::ColumnTile>(columns_at, *s.column_ring, s.first_columns, s.second_columns,
                                               maps.first_columns, maps.second_columns,
                                               first_column + n * Config::kBlockN, head, b);
      }
  }
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
