// The two producer threads: one describes the work tiles, one issues the TMA loads of their tiles of q, K and V.
#pragma once

#include <cuda.h>

#include "attn/pages.cuh"
#include "attn/wgmma/shared_memory.cuh"
#include "ptx/tma.cuh"

namespace qf {
namespace wgmma {

struct TensorMaps {
  CUtensorMap q, k, v;
};

// Where a sequence's keys begin in a transposed V: packed sequences begin at multiples of kPackedFrom.
constexpr int kPackedFrom = 128;
template <class Work>
__device__ __forceinline__ int64_t transposed_from(const QfAttnParams& p, const Work& work) {
  return p.cu_seqlens_q ? (work.seq.k0 / kPackedFrom + work.b) * kPackedFrom : 0;
}

// Checks, once per sequence, whether the page table has every page that its rows need.
struct SequencePages {
  int b = -1;
  bool missing = false;

  // Collective: all lanes of a warp, whose first has filled `work`.
  template <class Work>
  __device__ __forceinline__ void check(const QfAttnParams& p, Work& work) {
    __syncwarp();  // every lane sees what the first wrote
    if (work.b != b) {
      b = work.b;
      missing = __any_sync(0xffffffffu, needs_missing_page(p, work.seq, b, int(threadIdx.x % 32), 32));
    }
    __syncwarp();  // every lane has read the sequence
    if (missing && threadIdx.x % 32 == 0) work.refuse();
  }
};

// packed_tiles: PackedTiles::count(). Kernel::describe(params, work) adds what its consumers also need. By: one thread
// runs this; if there is a page table to check, a warp.
template <class Kernel, class By, class Config = typename Kernel::Config>
__device__ __forceinline__ void describe_work(const QfAttnParams& p, const typename Kernel::Params& params,
                                              const TileSchedule& schedule, const SharedMemory<Config>& s,
                                              int packed_tiles) {
  using Work = WorkTile<Config>;
  RingPosition<Config::kWorkTiles> at;
  uint32_t parity = 0;
  const auto wait_to_take = [&] {
    mbarrier_wait(s.next_tile, parity);
    parity ^= 1;
  };
  PackedTiles packed;
  SequencePages pages;
  schedule.template for_each<By>(packed_tiles < 0 ? schedule.count : packed_tiles, wait_to_take, [&](int index) {
    const TileSchedule::Tile tile =
        packed_tiles < 0 ? schedule.tile(index) : packed.tile(p, schedule, Config::kBlockM, index);
    at.wait_empty(*s.work_ring);
    if (By::leads()) s.work[at.stage()].fill(p, tile, packed_tiles);
    if constexpr (Config::kPaged) pages.check(p, s.work[at.stage()]);
    if (By::leads()) {
      // Reads the description back from memory: there are not enough registers to hold all of it.
      Work& work = *reinterpret_cast<Work*>(opaque_shared(reinterpret_cast<char*>(&s.work[at.stage()])));
      work.complete(p);
      if (work.tiles > 0) Kernel::describe(params, work);
      at.fill(*s.work_ring);
    }
    at.advance();
  });
  if (!By::leads()) return;
  at.wait_empty(*s.work_ring);
  s.work[at.stage()].tiles = -1;
  s.work[at.stage()].unserved = false;
  at.fill(*s.work_ring);
}

// Loads a tile, panel by panel, into the next empty stage, which is full once all bytes have arrived.
template <class Tile, int kStages>
__device__ __forceinline__ void load_tile(RingPosition<kStages>& at, Ring<kStages>& ring, char* s_tiles,
                                          const CUtensorMap& map, int column, int row, int head, int b) {
  Mbarrier* const full = &ring.full[at.stage()];
  char* const s_tile = s_tiles + at.stage() * Tile::kBytes;
  at.wait_empty(ring);
  mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll
  for (int panel = 0; panel < Tile::kCount; ++panel)
    copy_box(s_tile + panel * Tile::kPanelBytes, &map, column + panel * Tile::kPanelColumns, row, head, b, full);
  at.advance();
}

// Runs ahead as far as there are empty stages. K of tile n + 1 is needed before V of tile n, but its stage does not
// become empty any earlier.
template <class Config>
__device__ __forceinline__ void produce(const QfAttnParams& p, const TileSchedule& schedule, const TensorMaps& maps,
                                        const SharedMemory<Config>& s) {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using VTile = typename Config::VTile;
  RingPosition<Config::kWorkTiles> work_at;
  RingPosition<Config::kQStages> q_at;
  RingPosition<Config::kStages> k_at, v_at;
  for (;; work_at.release(*s.work_ring), work_at.advance()) {
    work_at.wait_full(*s.work_ring);
    const WorkTile<Config>& work = s.work[work_at.stage()];
    const int tiles = work.tiles;
    if (tiles < 0) return;
    // Taking the next work tile late balances the load better, but no thread should have to wait for it.
    constexpr int kAhead = 3;  // tiles of keys
    const auto let_take = [&] {
      if (schedule.dynamic) mbarrier_arrive(s.next_tile);
    };
    if (tiles <= kAhead) let_take();
    if (tiles == 0) continue;
    const int b = p.cu_seqlens_q ? 0 : work.b, kv_head = work.kv_head;
    const int first_key = int(work.seq.k0) + work.keys.begin;
    const int first_column = int(transposed_from(p, work)) + work.keys.begin;
    load_tile<QTile>(q_at, *s.q_ring, s.q, maps.q, 0, int(work.seq.q0) + work.row0, work.h, b);
    for (int n = 0; n < tiles; ++n) {
      if (n > 0 && n + kAhead == tiles) let_take();
      const int along = n * Config::kBlockN;
      load_tile<KTile>(k_at, *s.k_ring, s.k, maps.k, 0, first_key + along, kv_head, b);
      load_tile<VTile>(v_at, *s.v_ring, s.v, maps.v, Config::kVTransposed ? first_column + along : 0,
                       Config::kVTransposed ? 0 : first_key + along, kv_head, b);
    }
  }
}

}  // namespace wgmma
}  // namespace qf
