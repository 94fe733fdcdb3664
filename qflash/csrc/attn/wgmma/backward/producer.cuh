// The two producer threads: one describes the work tiles, one issues the TMA loads of their rows and columns.
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

// Looks up the counter of work tiles each time it takes one: its address would occupy registers in between.
struct OneOfFewRegisters : OneThread {
  static constexpr bool kKeepsAddress = false;
};

template <class Config>
__device__ __forceinline__ void describe_work(const QfAttnParams& p, const TileSchedule& schedule, const DsMemory& ds,
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
    work->fill(p, schedule.tile(index), schedule.rows, ds, *s.faults);
    // Reads the description back from memory: there are not enough registers to hold all of it.
    reinterpret_cast<WorkTile<Config>*>(opaque_shared(reinterpret_cast<char*>(work)))->complete();
    at.fill(*s.work_ring);
    at.advance();
  });
  at.wait_empty(*s.work_ring);
  s.work[at.stage()].tiles = -1;
  s.work[at.stage()].unserved = false;
  at.fill(*s.work_ring);
}

// Loads both operands of some tokens into the next empty stage, which is full once all bytes have arrived.
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

// Loads tile n of keys, and the dS tiles of the consumers whose queries see some of it; the others were never written.
template <class Config>
__device__ __forceinline__ void load_keys_and_ds(RingPosition<Config::kStages>& at, const SharedMemory<Config>& s,
                                                 const CUtensorMap& keys, const DsMemory& ds,
                                                 const WorkTile<Config>& work, int n, int head, int b) {
  using Tile = typename Config::ColumnTile;
  Mbarrier* const full = &s.column_ring->full[at.stage()];
  char* const s_keys = s.first_columns + at.stage() * Tile::kBytes;
  char* const s_ds = s.second_columns + at.stage() * Config::kSecondBytes;
  const int place = ds.tiles.place(work.columns.begin / Config::kBlockN + n), query_tile = work.row0 / kDsTile;
  const auto meets = [&](int consumer) { return n >= work.own[consumer].begin && n < work.own[consumer].end; };
  int bytes = Tile::kBytes;
#pragma unroll
  for (int c = 0; c < Config::kConsumers; ++c) bytes += meets(c) ? kDsTileBytes : 0;
  at.wait_empty(*s.column_ring);
  mbarrier_arrive_expect(full, bytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kCount; ++panel)
    copy_box(s_keys + panel * Tile::kPanelBytes, &keys, panel * Tile::kPanelColumns,
             int(work.first_column()) + n * Config::kBlockN, head, b, full);
#pragma unroll
  for (int c = 0; c < Config::kConsumers; ++c) {
    if (!meets(c)) continue;
    const char* const g_tile = ds.g_tiles + ds.tiles.tile(work.ds_head, query_tile + c, place) * kDsTileBytes;
    copy_bytes(s_ds + c * kDsTileBytes, g_tile, kDsTileBytes, full);
  }
  at.advance();
}

// Runs ahead as far as there are empty stages.
template <class Config>
__device__ __forceinline__ void produce(const QfAttnParams& p, const TileSchedule& schedule, const TensorMaps& maps,
                                        const DsMemory& ds, const SharedMemory<Config>& s) {
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<1> rows_at;
  RingPosition<Config::kStages> columns_at;
  for (;; work_at.release(*s.work_ring), work_at.advance()) {
    work_at.wait_full(*s.work_ring);
    const WorkTile<Config>& work = s.work[work_at.stage()];
    const int tiles = work.tiles;
    if (tiles < 0) return;
    // Taking the next work tile late balances the load better, but no thread should have to wait for it.
    constexpr int kAhead = 3;  // tiles of columns
    const auto let_take = [&] {
      if (schedule.dynamic) mbarrier_arrive(s.next_tile);
    };
    int left = tiles * work.heads;
    if (left <= kAhead) let_take();
    if (left == 0) continue;
    const int b = p.cu_seqlens_q ? 0 : work.b, first_column = int(work.first_column());
    if constexpr (!Config::kFromDs)
      load_pair<typename Config::RowTile>(rows_at, *s.row_ring, s.first_rows, s.second_rows, maps.first_rows,
                                          maps.second_rows, int(work.first_row()), work.row_head, b);
    for (int head = work.column_head; left > 0; ++head)
      for (int n = 0; n < tiles; ++n, --left) {
        if (left == kAhead && tiles * work.heads > kAhead) let_take();
        if constexpr (Config::kFromDs)
          load_keys_and_ds(columns_at, s, maps.first_columns, ds, work, n, head, b);
        else
          load_pair<typename Config::ColumnTile>(columns_at, *s.column_ring, s.first_columns, s.second_columns,
                                                 maps.first_columns, maps.second_columns,
                                                 first_column + n * Config::kBlockN, head, b);
      }
  }
}

}  // namespace backward
}  // namespace wgmma
}  // namespace qf
